"""What may be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snugfit.errors import UsageError
from snugfit.quantities import format_bytes, parse_bytes

Aim = Literal["time", "memory", "accuracy"]
"""What the chosen way of training is to have the best of, among those that fit."""


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
        storage: bytes of disk that caches and spilled weights may take.
        time_ratio: largest fraction of the full training step's time, in (0, 1].
        devices: how many devices may take part.
    """

    memory: float | str | None = None
    storage: float | str | None = None
    time_ratio: float | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        for name in ("memory", "storage"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_bytes(value))
        if self.time_ratio is not None and not 0 < self.time_ratio <= 1:
            raise UsageError(f"the time ratio must lie in (0, 1], not {self.time_ratio}.")
        if self.devices < 1:
            raise UsageError(f"at least one device is needed, not {self.devices}.")

    @property
    def memory_bytes(self) -> int | None:
        """The memory budget in bytes."""
        return self.memory  # type: ignore[return-value]

    @property
    def storage_bytes(self) -> int | None:
        """The storage budget in bytes."""
        return self.storage  # type: ignore[return-value]

    def __str__(self) -> str:
        parts = [format_bytes(self.memory_bytes) + " of memory" if self.memory_bytes else "unlimited memory"]
        if self.storage_bytes:
            parts.append(format_bytes(self.storage_bytes) + " of storage")
        if self.time_ratio is not None:
            parts.append(f"time ratio {self.time_ratio:g}")
        if self.devices > 1:
            parts.append(f"{self.devices} devices")
        return ", ".join(parts)
