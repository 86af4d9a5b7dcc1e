"""The machine of a profile or plan."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    """One device and the software on it.

    Attributes:
        device: ``"cpu"`` or ``"cuda:N"``.
        name: name of the processor or accelerator.
        threads: compute threads in use.
        memory_bytes: physical memory of the device.
        system: operating system and architecture.
        torch: version of torch.
        enforces: whether a memory budget can be enforced, not only predicted and measured.
    """

    device: str
    name: str
    threads: int
    memory_bytes: int
    system: str
    torch: str
    enforces: bool


def cores() -> int:
    """Cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Name of the processor."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
