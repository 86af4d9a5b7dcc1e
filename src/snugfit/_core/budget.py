"""Limits of memory, storage, time and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from snugfit._core.amounts import parse_bytes
from snugfit._core.options import Range, Workers, checked
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
        memory: growth of the process's private memory (CPU) or reserved device memory (CUDA), in bytes.
        storage: bytes of disk for caches and spilled weights.
        time_ratio: largest fraction of the full training step's time, in (0, 1].
    """

    memory: float | str | None = None
    storage: float | str | None = None
    time_ratio: TimeRatio | None = None
    devices: Workers = 1

    def __post_init__(self) -> None:
        for name in ("memory", "storage"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_bytes(value))
        object.__setattr__(self, "time_ratio", checked("time_ratio", TimeRatio | None, self.time_ratio))
        object.__setattr__(self, "devices", checked("devices", Workers, self.devices))

    @property
    def memory_bytes(self) -> int | None:
        """The memory budget in bytes."""
        return None if self.memory is None else int(self.memory)

    @property
    def storage_bytes(self) -> int | None:
        """The storage budget in bytes."""
        return None if self.storage is None else int(self.storage)

    def __str__(self) -> str:
        parts = [format_bytes(self.memory_bytes) + " of memory" if self.memory_bytes else "unlimited memory"]
        if self.storage_bytes:
            parts.append(format_bytes(self.storage_bytes) + " of storage")
        if self.time_ratio is not None:
            parts.append(f"time ratio {self.time_ratio:g}")
        if self.devices > 1:
            parts.append(f"{self.devices} devices")
        return ", ".join(parts)
