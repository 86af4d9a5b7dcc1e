"""What past runs on this machine teach: how much longer they took than was predicted, and whether any needed more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from snugfit._core.cost import Cost
from snugfit._core.plan import Correction
from snugfit._core.record import Record
from snugfit._core.workload import Workload

ENOUGH_SECONDS = 1.0
"""A run that trained for less tells of warming up rather than of training."""
ALIKE, OTHERS = 9, 15
"""Latest runs that count: of the same network, and of any network in the same way of training."""
FEWEST_OTHERS = 3
"""Runs of other networks from which something is concluded for this one."""
PEAK_MARGIN = 0.01
"""Share by which a peak is predicted above the highest that was ever measured, where one exceeded its prediction."""


@dataclass(frozen=True)
class PastRun:
    """A finished run, in short.

    Attributes:
        strategy, model, input_shape: what was trained, and how.
        predicted_seconds, seconds: of its phases, predicted without any correction, and measured.
        predicted_bytes, peak_bytes: its peak memory above the baseline, likewise; of the phase that missed its own
            prediction by the largest share, where one did.
    """

    strategy: str
    model: str
    input_shape: tuple[int, ...]
    predicted_seconds: float
    seconds: float
    predicted_bytes: int
    peak_bytes: int

    @property
    def tells(self) -> bool:
        """Whether its figures can be compared."""
        return min(self.predicted_seconds, self.predicted_bytes, self.peak_bytes) > 0 and self.seconds >= ENOUGH_SECONDS


def past_run(record: Record, workload: Workload, corrected: Correction) -> PastRun:
    """A record in short; the correction that its predictions were made with is taken out of them."""
    finished = [phase for phase in record.phases if phase.epochs == workload.epochs]
    peaks = [(record.predicted["peak_bytes"], record.measured["peak_bytes"])]
    peaks += [(phase.predicted_peak_bytes, phase.measured_peak_bytes) for phase in record.phases if phase.missed]
    predicted_bytes, peak_bytes = max(peaks, key=lambda pair: pair[1] / max(pair[0], 1))
    return PastRun(
        strategy=record.strategy,
        model=workload.model,
        input_shape=workload.input_shape,
        predicted_seconds=sum(phase.predicted_seconds for phase in finished) / corrected.seconds,
        seconds=sum(phase.seconds for phase in finished),
        predicted_bytes=int(predicted_bytes / corrected.peak),
        peak_bytes=peak_bytes,
    )


def correction(runs: Sequence[PastRun], strategy: str, workload: Workload) -> Correction:
    """What to multiply predictions of a strategy by.

    Seconds take the median ratio of the latest runs of this network, or else of enough runs of others in the same way;
    a run counts as much as it took, since short ones spend much of their time on starting.
    Peaks are never corrected downwards: a run that needed less than was predicted may have been lucky.

    Args:
        runs: past runs, oldest first.
        strategy, workload: what is to be predicted.
    """
    same = [run for run in runs if run.tells and run.strategy == strategy]
    alike = [run for run in same if (run.model, run.input_shape) == (workload.model, tuple(workload.input_shape))]
    heeded = alike[-ALIKE:] or (same[-OTHERS:] if len(same) >= FEWEST_OTHERS else [])
    if not heeded:
        return Correction()
    highest = max(run.peak_bytes / run.predicted_bytes for run in heeded)
    return Correction(
        seconds=_median([(run.seconds / run.predicted_seconds, run.seconds) for run in heeded]),
        peak=highest * (1 + PEAK_MARGIN) if highest > 1 else 1.0,
        runs=len(heeded),
    )


def _median(weighted: Sequence[tuple[float, float]]) -> float:
    """The smallest value up to which half of the weight lies, of pairs of values and weights."""
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
