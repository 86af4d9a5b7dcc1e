"""The machine that a profile and a plan are true for."""

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
        name: processor or accelerator, as it calls itself.
        threads: compute threads in use.
        memory_bytes: physical memory of the device.
        system: operating system and architecture.
        torch: version of torch.
        enforces: whether a memory budget can be enforced here, and not only predicted and measured.
    """

    device: str
    name: str
    threads: int
    memory_bytes: int
    system: str
    torch: str
    enforces: bool


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor, as it calls itself."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
