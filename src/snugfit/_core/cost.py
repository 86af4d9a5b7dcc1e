"""Predicted costs of a strategy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A part of a run whose prediction is checked separately: a block, the whole network, the final test.

    Attributes:
        name: name of the phase.
        peak_bytes: predicted peak memory above the baseline.
        seconds: predicted seconds.
        batch_size: samples in memory at once.
        units: names of the units that it trains.
        storage_bytes: bytes of its cache.
    """

    name: str
    peak_bytes: int
    seconds: float
    batch_size: int
    units: tuple[str, ...] = ()
    storage_bytes: int = 0


@dataclass(frozen=True)
class Shortfall:
    """Why a strategy proposes nothing, and which budget suffices.

    Attributes:
        reasons: reasons as text.
        smallest_bytes: the smallest sufficient memory budget; None if memory is not the reason.
        smallest_ratio: the smallest sufficient time ratio; None if time is not the reason.
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
        seconds: total seconds, including cache writes.
        storage_bytes: most bytes on disk at any time.
        sent_bytes: total bytes sent over the network.
        phases: the phases in order.
    """

    peak_bytes: int
    seconds_per_epoch: float
    seconds: float
    storage_bytes: int = 0
    sent_bytes: int = 0
    phases: tuple[Phase, ...] = ()
