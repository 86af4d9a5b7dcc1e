"""A short run of a candidate, to hold a plan's prediction against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from snugfit._core.record import Record
from snugfit._core.serial import to_data

STEPS = 4
"""Effective batches of a trial, where nothing else is said."""


@dataclass(frozen=True)
class Trial:
    """What was predicted of a short run, and what was measured in it.

    Attributes:
        strategy: what ran.
        images, epochs: how many training images it had, and passes over them.
        budget_bytes: memory budget, in force; None without one.
        predicted_peak_bytes, measured_peak_bytes: peak memory above the baseline; None where it did not end.
        predicted_seconds, measured_seconds: of its phases that train; measured, of their steps alone, at the median.
        error: why it did not end, or went beyond its budget.
    """

    strategy: str
    images: int
    epochs: int
    budget_bytes: int | None
    predicted_peak_bytes: int
    predicted_seconds: float
    measured_peak_bytes: int | None = None
    measured_seconds: float | None = None
    error: str | None = None

    @property
    def seconds_ratio(self) -> float | None:
        """Measured over predicted seconds."""
        if self.measured_seconds is None or not self.predicted_seconds:
            return None
        return self.measured_seconds / self.predicted_seconds

    @property
    def peak_ratio(self) -> float | None:
        """Measured over predicted peak; above 1, the prediction was no bound."""
        return None if self.measured_peak_bytes is None else self.measured_peak_bytes / self.predicted_peak_bytes

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, with the two ratios."""
        return {**to_data(self), "peak_ratio": self.peak_ratio, "seconds_ratio": self.seconds_ratio}


def measured_in(record: Record, paces: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What a record tells a trial, of its phases that train.

    Args:
        record: of the run.
        paces: seconds of every training step, by the name of the phase.

    Returns:
        Fields of a trial. Steps count at their median: the first ones generate kernels, which a long run does not feel.
    """
    phases = [phase for phase in record.phases if paces.get(phase.name)]
    return {
        "predicted_seconds": float(sum(phase.predicted_seconds for phase in phases)),
        "measured_peak_bytes": int(record.measured["peak_bytes"]),
        "measured_seconds": float(sum(len(paces[each.name]) * median(paces[each.name]) for each in phases)),
    }
