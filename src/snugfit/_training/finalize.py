"""Create the record of a finished run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from snugfit._core.own_cores import on_own_core
from snugfit._core.record import PRECISIONS, IntervalRecord, Record
from snugfit._core.serial import to_data
from snugfit._core.workload import Workload
from snugfit._training.events import Notice, RunDone
from snugfit._training.own_metrics import Values, reset, values_of
from snugfit._training.run import Run
from snugfit._training.strategy import BatchSource, TrainingData
from snugfit._training.task import Score, measure, task_of
from snugfit.errors import MEMORY_ERRORS
from snugfit.memory import is_out_of_memory, release_memory

BUDGETS = ("memory_bytes", "total_memory_bytes", "host_memory_bytes", "storage_bytes", "time_ratio")


@dataclass(frozen=True)
class FinalEvaluation:
    """Accuracies in [0, 1] of the finished model; the confusion matrix is that of the test split, if there is one.

    Of several labels they are mAP, and in detection mAP50, without top-5 accuracy and confusion matrix. ``metrics`` are
    those from Python, by name and split.
    """

    val: float | None
    test: float | None
    test_top5: float | None
    confusion: list[list[int]]
    metrics: dict[str, dict[str, float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a strategy's training.

    Attributes:
        settings: as they were in the end.
        parameters: counts by kind of model.
        intervals: between two selections of tensors.
        tensors: names of the tensors that selections are made among.
        loss_scale: that of gradients in float16, and the number of skipped steps.
    """

    strategy: str
    settings: dict[str, Any]
    evaluation: FinalEvaluation
    parameters: dict[str, int]
    exit_taken: dict[str, Any] | None = None
    intervals: Sequence[IntervalRecord] = ()
    tensors: Sequence[str] = ()
    loss_scale: dict[str, float] | None = None


def evaluate_model(
    forward: Callable[[Tensor], Tensor], data: TrainingData, run: Run, batch_size: int
) -> FinalEvaluation:
    """Measure the finished model on validation and test data.

    ``forward`` turns images (B, C, H, W) into outputs, such as logits (B, classes), in evaluation mode. At most
    ``batch_size`` images are in memory at once; fewer if the budget refuses them.
    """
    score = score_within(forward, data.val, run, batch_size)
    val = score.value if len(data.val) else None
    metrics = {"val": values_of(run.own.metrics) if len(data.val) else {}}
    if score.at_chance:
        mean, classes = score.mean_of_classes
        run.emit(
            Notice(
                f"nothing was learned: the {classes} classes of validation images have a mean accuracy of {mean:.1%}, "
                "as by guessing. Try another --lr, more --epochs, or pre-trained --weights, and check the labels"
            )
        )
    if data.test is None:
        return FinalEvaluation(val, None, None, score.confusion, _by_name(metrics))
    score = score_within(forward, data.test, run, batch_size)
    metrics["test"] = values_of(run.own.metrics)
    return FinalEvaluation(val, score.value, score.top5, score.confusion, _by_name(metrics))


def _by_name(metrics: dict[str, Values]) -> dict[str, Values]:
    """Values by metric and split, of those by split and metric."""
    names = dict.fromkeys(name for values in metrics.values() for name in values)
    return {name: {split: values[name] for split, values in metrics.items() if name in values} for name in names}


def score_within(forward: Callable[[Tensor], Tensor], source: BatchSource, run: Run, size: int) -> Score:
    """:func:`measure` on batches (B, ...) within the budget; if memory is refused, again with half as many images."""
    while True:
        try:
            with run.limit.allow_kernels(), run.freed.kept():
                batches = metered(source.in_order(size), run)
                reset(run.own.metrics)
                return measure(task_of(run.workload), forward, batches, run.device, run.own.metrics)
        except MEMORY_ERRORS as error:
            if size == 1 or not is_out_of_memory(error):
                raise
        release_memory()
        run.emit(Notice(f"evaluation: {size} images at once were refused memory; going on with {size // 2}"))
        size //= 2


def metered(batches: Iterator[tuple[Tensor, Tensor]], run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches (B, ...), with a memory reading before each, because the system may drop mapped weights.

    After the last one freed memory goes back to the system, unless room is ample and there are no own metrics: scores
    of many images may take more than a step.
    """
    for batch in batches:
        run.tick()
        with on_own_core():
            yield batch
    run.freed.pause(always=bool(run.own.metrics))


def _accuracies(evaluation: FinalEvaluation, workload: Workload) -> dict[str, float | None]:
    found = {"val": evaluation.val, "test": evaluation.test, "test_top5": evaluation.test_top5}
    measure = task_of(workload).metric
    for key in (key for key, name in PRECISIONS.items() if name == measure):
        found[key] = evaluation.val if evaluation.test is None else evaluation.test
    return found


def _fields(source: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def make_record(run: Run, data: TrainingData, outcome: Outcome) -> Record:
    """Combine prediction and measurement into the record, and emit the end of the run."""
    run.tick()
    position, predicted, workload = run.position, run.predicted, run.workload
    record = Record(
        strategy=outcome.strategy,
        model=workload.model,
        data=workload.data,
        device=str(run.device),
        budget=_fields(run.budget, *BUDGETS),
        enforced=run.enforced,
        predicted={
            **_fields(predicted, "peak_bytes", "seconds", "storage_bytes"),
            "total_memory_bytes": run.memory.rest_bytes + predicted.peak_bytes if run.memory else None,
        },
        measured={
            "peak_bytes": position.peak_bytes,
            "peak_metric": run.meter.metric,
            "total_memory_bytes": position.total_bytes or None,
            "tensor_peak_bytes": max((phase.tensor_peak_bytes for phase in position.phases), default=0),
            "seconds": position.seconds,
            "data_seconds": position.data_seconds,
            "storage_bytes": position.storage_bytes,
            "decoded_bytes": position.decoded_bytes,
            "missed_phases": [phase.name for phase in position.phases if phase.exceeded],
            "device_memory": position.device_shares or None,
            "energy_joules": position.energy_joules if run.energy.counts else None,
            "loss_scale": outcome.loss_scale,
        },
        accuracy=_accuracies(outcome.evaluation, workload),
        parameters=outcome.parameters,
        exit=outcome.exit_taken,
        settings=outcome.settings,
        run_dir=str(run.folder),
        phases=tuple(position.phases),
        exits=tuple(position.exits),
        kept=position.kept,
        intervals=tuple(outcome.intervals),
        tensors=tuple(outcome.tensors),
        profile=to_data(run.profile),
        overhead_seconds={"profiling": run.profile.seconds, **position.overheads},
        confusion=outcome.evaluation.confusion,
        class_names=data.class_names,
        metrics=outcome.evaluation.metrics,
        workload=to_data(workload),
        hardware=to_data(run.hardware),
    )
    run.emit(RunDone(record))
    return record
