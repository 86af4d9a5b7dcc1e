"""Turn a finished run into its record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from snugfit.core.record import Record
from snugfit.core.serial import to_data
from snugfit.training.events import RunDone
from snugfit.training.loop import count_correct
from snugfit.training.run import Run
from snugfit.training.split import TrainingData


@dataclass(frozen=True)
class FinalEvaluation:
    """Accuracies in [0, 1] of the finished model; the confusion matrix is that of the test split where there is one."""

    val: float
    test: float | None
    test_top5: float | None
    confusion: list[list[int]]


def evaluate_model(
    forward: Callable[[Tensor], Tensor], data: TrainingData, run: Run, batch_size: int
) -> FinalEvaluation:
    """Measure the finished model on validation and test data.

    Args:
        forward: images (B, C, H, W) to logits (B, classes), in evaluation mode.
        data: the splits.
        run: the run, for its device and workload.
        batch_size: images in memory at once.
    """
    classes = run.workload.classes
    with run.limit.room_for_kernels():
        confusion, _ = count_correct(forward, data.val.in_order(batch_size), classes, run.device)
    val = _accuracy(confusion)
    if data.test is None:
        return FinalEvaluation(val, None, None, confusion.tolist())
    with run.limit.room_for_kernels():
        confusion, among_five = count_correct(forward, data.test.in_order(batch_size), classes, run.device)
    return FinalEvaluation(val, _accuracy(confusion), among_five / max(len(data.test), 1), confusion.tolist())


def _accuracy(confusion: Tensor) -> float:
    return float(confusion.trace()) / max(int(confusion.sum()), 1)


def make_record(
    run: Run,
    *,
    strategy: str,
    settings: dict[str, Any],
    evaluation: FinalEvaluation,
    parameters: dict[str, int],
    data: TrainingData,
    exit_taken: dict[str, Any] | None = None,
) -> Record:
    """Put prediction beside measurement, and tell the subscribers that the run is done."""
    run.tick()
    position, predicted, workload = run.position, run.predicted, run.workload
    record = Record(
        strategy=strategy,
        model=workload.model,
        data=workload.data,
        device=str(run.device),
        budget={
            "memory_bytes": run.budget.memory_bytes,
            "storage_bytes": run.budget.storage_bytes,
            "time_ratio": run.budget.time_ratio,
        },
        enforced=run.enforced,
        predicted={
            "peak_bytes": predicted.peak_bytes,
            "seconds": predicted.seconds,
            "storage_bytes": predicted.storage_bytes,
        },
        measured={
            "peak_bytes": position.peak_bytes,
            "peak_metric": run.meter.metric,
            "tensor_peak_bytes": max((phase.tensor_peak_bytes for phase in position.phases), default=0),
            "seconds": position.seconds,
            "storage_bytes": position.storage_bytes,
        },
        accuracy={"val": evaluation.val, "test": evaluation.test, "test_top5": evaluation.test_top5},
        parameters=parameters,
        exit=exit_taken,
        settings=settings,
        run_dir=str(run.folder),
        phases=tuple(position.phases),
        exits=tuple(position.exits),
        profile=to_data(run.profile),
        overhead_seconds={"profiling": run.profile.seconds, **position.overheads},
        confusion=evaluation.confusion,
        class_names=data.class_names,
        workload=to_data(workload),
        hardware=to_data(run.hardware),
    )
    run.emit(RunDone(record))
    return record
