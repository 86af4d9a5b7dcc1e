"""The machine that a profile and a plan are true for."""

from __future__ import annotations

from dataclasses import dataclass


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
