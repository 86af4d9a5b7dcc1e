"""Arms and rows of the queue for tests."""

from __future__ import annotations

from benchmarks.queue.arms import Arm
from benchmarks.queue.rungs import Row, Task
from benchmarks.queue.runner import row_of

DIGESTS = {("backprop", "smallconv"): "b1"}


def arm(name: str = "a", *, images: int = 45_000, epochs: int = 100, priority: int = 1, **more: object) -> Arm:
    settings = {"model": "smallconv", "data": "mnist", "strategy": "backprop", "option": name}
    return Arm("table", name, settings, images, epochs, priority, **more)  # type: ignore[arg-type]


def done(task: Task, digest: str = "b1", *, code: int = 0, val: float = 0.5, seconds: float = 10.0) -> Row:
    record: Row = {"accuracy": {"val": val, "test": val}, "measured": {"seconds": seconds + 2, "peak_bytes": 5_000_000}}
    record["parameters"] = {"full": 500_000, "trained_model": 250_000}
    output = record if code == 0 else {"error": {"type": "X", "message": "no such file: /a/runs/x. Look there."}}
    metrics = [{"phase": "network", "epoch": "2", "val_accuracy": str(val + 0.1), "seconds": str(seconds)}]
    return row_of(task, digest, "abc", code, output, metrics)


def rows_of(tasks: list[Task], **more: object) -> dict[str, Row]:
    return {task.key: done(task, **more) for task in tasks}  # type: ignore[arg-type]
