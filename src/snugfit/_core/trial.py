"""A short run of a candidate, to compare with the plan's prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from snugfit._core.record import Record
from snugfit._core.serial import to_data

STEPS = 4
"""Default number of effective batches of a trial."""


@dataclass(frozen=True)
class Trial:
    """Predictions and measurements of a short run.

    Attributes:
        strategy: name of the strategy.
        images, epochs: numbers of training images and passes over them.
        budget_bytes: enforced memory budget; None without one.
        predicted_peak_bytes, measured_peak_bytes: peak memory above the baseline; None if it failed.
        predicted_seconds, measured_seconds: seconds of its training phases; measured from the median step time.
        error: why it failed or exceeded its budget.
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
        """Measured over predicted peak; above 1, the prediction was too low."""
        return None if self.measured_peak_bytes is None else self.measured_peak_bytes / self.predicted_peak_bytes

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, with the two ratios."""
        return {**to_data(self), "peak_ratio": self.peak_ratio, "seconds_ratio": self.seconds_ratio}


def trial_measurements(record: Record, paces: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Fields of a trial from a record of training phases.

    Args:
        record: the record of the run.
        paces: seconds of every training step, by phase name.

    Returns:
        Fields of a trial. The median step time excludes kernel generation, which is negligible in a long run.
    """
    phases = [phase for phase in record.phases if paces.get(phase.name)]
    return {
        "predicted_seconds": float(sum(phase.predicted_seconds for phase in phases)),
        "measured_peak_bytes": int(record.measured["peak_bytes"]),
        "measured_seconds": float(sum(len(paces[each.name]) * median(paces[each.name]) for each in phases)),
    }
