"""Limits of memory, storage, time and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from snugfit._core.amounts import parse_bytes
from snugfit._core.options import AUTO, Range, Workers, checked
from snugfit._quantities import format_bytes

Aim = Literal["time", "memory", "accuracy"]
"""Criterion that ranks the candidates that fit."""
TimeRatio = Annotated[float, Range(above=0, most=1)]


@dataclass(frozen=True)
class Budget:
    """Limits that a run must stay within; None means unlimited.

    Sizes may be given as text (``"100MB"``, ``"512MiB"``) and are kept as bytes.

    >>> budget = Budget(memory="100MB", storage="2GB")
    >>> budget.memory_bytes
    100000000
    >>> print(budget)
    100.0 MB of memory, 2.0 GB of storage

    Attributes:
        memory: growth of the process's private memory (CPU), or all that the process takes of the device, context and
            libraries included (CUDA), in bytes. If ``total_memory`` is given instead, a plan derives it.
        total_memory: private memory of all processes of a run, those at rest included, in bytes; or ``"auto"``: what
            the machine or its control group has, less what others use.
        host_memory: where ``memory`` is that of a GPU: growth of the process's private memory, pinned pages included.
        storage: bytes of disk for caches and spilled weights.
        time_ratio: largest fraction of the full training step's time, in (0, 1].
    """

    memory: float | str | None = None
    storage: float | str | None = None
    time_ratio: TimeRatio | None = None
    devices: Workers = 1
    total_memory: float | str | None = None
    host_memory: float | str | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "storage", "total_memory", "host_memory"):
            value = getattr(self, name)
            if value is not None and (value, name) != (AUTO, "total_memory"):
                object.__setattr__(self, name, parse_bytes(value))
        object.__setattr__(self, "time_ratio", checked("time_ratio", TimeRatio | None, self.time_ratio))
        object.__setattr__(self, "devices", checked("devices", Workers, self.devices))

    @property
    def memory_bytes(self) -> int | None:
        """The memory budget in bytes."""
        return None if self.memory is None else int(self.memory)

    @property
    def total_memory_bytes(self) -> int | None:
        """The budget of all processes in bytes; None without one, and for ``auto`` before a plan has resolved it."""
        return None if self.total_memory in (None, AUTO) else int(self.total_memory)

    @property
    def host_memory_bytes(self) -> int | None:
        """The budget of the process next to a device in bytes."""
        return None if self.host_memory is None else int(self.host_memory)

    @property
    def memory_flag(self) -> str:
        """The flag that bounds the memory."""
        return "--memory" if self.total_memory is None else "--total-memory"

    @property
    def memory_kind(self) -> str:
        """What an error calls the budget of memory."""
        return "budget" if self.total_memory is None else "--total-memory"

    @property
    def storage_bytes(self) -> int | None:
        """The storage budget in bytes."""
        return None if self.storage is None else int(self.storage)

    def __str__(self) -> str:
        parts = [self.memory_text]
        if self.host_memory_bytes:
            parts.append(format_bytes(self.host_memory_bytes) + " of host memory")
        if self.storage_bytes:
            parts.append(format_bytes(self.storage_bytes) + " of storage")
        if self.time_ratio is not None:
            parts.append(f"time ratio {self.time_ratio:g}")
        if self.devices > 1:
            parts.append(f"{self.devices} devices")
        return ", ".join(parts)

    @property
    def memory_text(self) -> str:
        """The budget of memory, for people."""
        if self.total_memory is None:
            return format_bytes(self.memory_bytes) + " of memory" if self.memory_bytes else "unlimited memory"
        total = self.total_memory_bytes
        return f"{AUTO if total is None else format_bytes(total)} of memory in all"
