"""What a strategy would use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One stretch of a run whose prediction is checked on its own: a block, the whole network, the final test.

    Attributes:
        name: what runs in it.
        peak_bytes: predicted peak memory above the baseline.
        seconds: predicted seconds.
        batch_size: samples that are in memory at once.
        units: names of the units that train in it.
        storage_bytes: bytes of cache that it writes.
    """

    name: str
    peak_bytes: int
    seconds: float
    batch_size: int
    units: tuple[str, ...] = ()
    storage_bytes: int = 0


@dataclass(frozen=True)
class Shortfall:
    """Why a strategy proposes nothing, and what would do.

    Attributes:
        reasons: in words.
        smallest_bytes: the smallest memory budget that would do; None where it is not memory that lacks.
        smallest_ratio: the smallest time ratio that would do; None where it is not time that lacks.
    """

    reasons: tuple[str, ...]
    smallest_bytes: int | None = None
    smallest_ratio: float | None = None


@dataclass(frozen=True)
class Cost:
    """Predicted cost of a whole run.

    Attributes:
        peak_bytes: largest peak of all phases, above the baseline.
        seconds_per_epoch: seconds of one epoch (every block's pass over the data once).
        seconds: seconds in all, cache writes included.
        storage_bytes: most bytes on disk at any one time.
        sent_bytes: bytes sent over the network in all.
        phases: the phases in order.
    """

    peak_bytes: int
    seconds_per_epoch: float
    seconds: float
    storage_bytes: int = 0
    sent_bytes: int = 0
    phases: tuple[Phase, ...] = ()
