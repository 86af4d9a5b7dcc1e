"""Corrections of predictions from past runs on this machine: ratios of measured to predicted time and peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from snugfit._core.plan import Correction, Cost
from snugfit._core.record import Record
from snugfit._core.workload import Workload

MIN_SECONDS = 1.0
"""Shorter runs say more about warming up than about training, and do not count."""
SAME_NETWORK_RUNS, OTHER_NETWORK_RUNS = 9, 15
"""Number of latest runs that count: of the same network, and of any network with the same strategy."""
MIN_OTHER_RUNS = 3
"""Fewest runs of other networks that give a correction for this one."""
PEAK_MARGIN = 0.01
"""Relative margin above the highest measured ratio of peaks, if a peak exceeded its prediction."""


@dataclass(frozen=True)
class PastRun:
    """Summary of a finished run.

    Attributes:
        strategy, model, input_shape: the strategy, the network and the shape (C, H, W) of an image.
        predicted_seconds, seconds: seconds of its phases, predicted without correction, and measured; both without
            what other processes added.
        predicted_bytes, peak_bytes: its peak memory above the baseline, predicted and measured; if phases exceeded
            their predictions, at least what is predicted and the most by which one did.
    """

    strategy: str
    model: str
    input_shape: tuple[int, ...]
    predicted_seconds: float
    seconds: float
    predicted_bytes: int
    peak_bytes: int

    @property
    def comparable(self) -> bool:
        """Whether its figures can be compared."""
        return min(self.predicted_seconds, self.predicted_bytes, self.peak_bytes) > 0 and self.seconds >= MIN_SECONDS


def past_run(record: Record, workload: Workload, corrected: Correction) -> PastRun:
    """Summary of a record; its predictions are stored without their correction."""
    finished = [phase for phase in record.phases if phase.epochs == workload.epochs]
    predicted = record.predicted["peak_bytes"]
    excess = [phase.measured_peak_bytes - phase.predicted_peak_bytes for phase in record.phases if phase.exceeded]
    peak_bytes = max([record.measured["peak_bytes"], *(predicted + more for more in excess)])
    return PastRun(
        strategy=record.strategy,
        model=workload.model,
        input_shape=workload.input_shape,
        predicted_seconds=sum(phase.predicted_seconds for phase in finished) / corrected.seconds,
        seconds=sum(phase.seconds - phase.delay_seconds for phase in finished),
        predicted_bytes=int(predicted / corrected.peak),
        peak_bytes=peak_bytes,
    )


def correction(runs: Sequence[PastRun], strategy: str, workload: Workload) -> Correction:
    """Factors for predictions of a strategy.

    The factor of seconds is the median ratio of the latest runs of this network, or else of enough runs of other
    networks with the same strategy. A run's weight is its duration, since short runs spend much of their time on start.
    Peaks are never corrected downwards: a run that needed less than predicted is no guarantee for the next. Runs are
    given oldest first.
    """
    same = [run for run in runs if run.comparable and run.strategy == strategy]
    network = workload.model, tuple(workload.input_shape)
    same_network = [run for run in same if (run.model, run.input_shape) == network]
    counted = same_network[-SAME_NETWORK_RUNS:] or (same[-OTHER_NETWORK_RUNS:] if len(same) >= MIN_OTHER_RUNS else [])
    highest = max((run.peak_bytes / run.predicted_bytes for run in counted), default=1.0)
    return Correction(
        seconds=_median([(run.seconds / run.predicted_seconds, run.seconds) for run in counted]) if counted else 1.0,
        peak=highest * (1 + PEAK_MARGIN) if highest > 1 else 1.0,
        runs=len(counted),
    )


def _median(weighted: Sequence[tuple[float, float]]) -> float:
    """Weighted median of pairs of value and weight."""
    half, below = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        below += weight
        if below >= half:
            return value
    raise ValueError("there is no value")


def corrected(cost: Cost, by: Correction) -> Cost:
    """A predicted cost with seconds and peaks corrected."""
    phases = tuple(
        replace(phase, peak_bytes=int(phase.peak_bytes * by.peak), seconds=phase.seconds * by.seconds)
        for phase in cost.phases
    )
    return replace(
        cost,
        phases=phases,
        peak_bytes=int(cost.peak_bytes * by.peak),
        seconds=cost.seconds * by.seconds,
        seconds_per_epoch=cost.seconds_per_epoch * by.seconds,
    )
