"""Phases and intervals of a record: step times relative to a full step, tensors and parameters. No drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from snugfit._core.record import IntervalRecord, PhaseRecord, Record
from snugfit._report.metrics import MetricRow


def training_phases(record: Record) -> list[PhaseRecord]:
    """The phases that trained units; all phases if none says which units it trained."""
    return [phase for phase in record.phases if phase.units] or list(record.phases)


def phase_blocks(record: Record, rows: Sequence[MetricRow]) -> dict[str, int]:
    """Number every training phase from 0, in order; phases that only ``metrics.csv`` knows come last."""
    blocks = {phase.name: index for index, phase in enumerate(training_phases(record))}
    for row in rows:
        blocks.setdefault(row.phase, len(blocks))
    return blocks


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step, a mean over the epochs of all intervals; measured is None if none was timed."""

    predicted: float
    measured: float | None
    full: float

    def over(self, ratio: float) -> bool:
        """Whether measured steps took more than this share of a full one, to the two digits that are shown."""
        return self.measured is not None and round(self.measured / self.full, 2) > round(ratio, 2)


def step_time(intervals: Sequence[IntervalRecord]) -> StepTime | None:
    """Step time over the intervals that trained; None if there are none."""
    run = [each for each in intervals if each.epochs and each.full_seconds > 0]
    if not run:
        return None
    epochs = sum(each.epochs for each in run)
    predicted, measured, full = (
        sum(getattr(each, name) * each.epochs for each in run) / epochs
        for name in ("predicted_seconds", "measured_seconds", "full_seconds")
    )
    return StepTime(predicted, measured if all(each.measured_seconds > 0 for each in run) else None, full)


def epoch_words(interval: IntervalRecord) -> str:
    """Epochs of an interval, from 1: ``3``, or ``3-4``."""
    first, last = interval.first_epoch + 1, interval.first_epoch + interval.epochs
    return str(first) if last <= first else f"{first}\N{EN DASH}{last}"


def phase_of(record: Record, index: int) -> PhaseRecord | None:
    """The phase that an interval was trained in."""
    return next((phase for phase in record.phases if phase.name == f"interval {index + 1}"), None)


@dataclass(frozen=True)
class Tensors:
    """The tensors that can be selected, in order of execution.

    ``parameters`` are numbers of elements by name, empty if the record does not say. ``classifier`` are the names of
    those that always train.
    """

    names: tuple[str, ...]
    parameters: dict[str, int]
    classifier: frozenset[str]

    def counted(self, chosen: Sequence[str]) -> int | None:
        """Parameters of a selection; None if the record does not say."""
        return sum(self.parameters.get(name, 0) for name in chosen) if self.parameters else None


def tensors_of(record: Record) -> Tensors:
    """The tensors of a record with intervals; those that were ever selected if it does not list them all."""
    profile = record.profile.get("tensors") or {}
    owned = [operator["tensors"] for operator in profile.get("operators", ()) if operator["tensors"]]
    parameters = {tensor["name"]: int(tensor["parameters"]) for tensors in owned for tensor in tensors}
    names = record.tensors or tuple(dict.fromkeys(name for each in record.intervals for name in each.tensors))
    last = (record.tensors or record.intervals[0].tensors)[-1]
    if owned:
        classifier = frozenset(tensor["name"] for tensor in owned[-1])
    else:
        classifier = frozenset(name for name in names if name.rpartition(".")[0] == last.rpartition(".")[0])
    return Tensors(names, parameters, classifier)
