"""How long a run takes, from the seconds per image of those that were run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from benchmarks.queue.rungs import Row, Task

_SAME: tuple[Callable[[Row, Task], bool], ...] = (
    lambda row, task: (row["experiment"], row["arm"]) == (task.arm.experiment, task.arm.name),
    lambda row, task: all(row["settings"][each] == task.settings[each] for each in ("model", "strategy", "data")),
    lambda row, task: row["settings"]["model"] == task.settings["model"],
)
"""Rows that a run is judged by: those of its arm, else of its model, strategy and data, else of its model."""


def seconds(task: Task, rows: Iterable[Row]) -> float | None:
    """Estimated seconds of a run; None while nothing like it was measured."""
    measured = [row for row in rows if row["training_seconds"]]
    for same in _SAME:
        like = [row for row in measured if same(row, task)]
        if like:
            rate = median(row["training_seconds"] / (row["images"] * row["epochs"]) for row in like)
            rest = median(row["seconds"] - row["training_seconds"] for row in like)
            return float(rate * task.images * task.epochs + rest)
    return None


def duration(value: float | None) -> str:
    """Seconds in words: ``3 d 4 h``, ``2 h 5 min``, ``40 s``."""
    if value is None:
        return "unknown"
    days, hours, minutes = int(value // 86_400), int(value // 3_600 % 24), int(value // 60 % 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{value:.0f} s"
