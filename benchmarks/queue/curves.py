"""Validation accuracy over the seconds of a run, and what several seeds of it reach by a given time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

Point = tuple[float, float]
"""Seconds since the run began, and validation accuracy in [0, 1]."""


def curve_of(record: dict[str, Any], metrics: Sequence[dict[str, str]]) -> list[Point]:
    """Validation accuracy after every epoch, or of the best exit after every block.

    Seconds are those of profiling and of all phases until then, validation included. Within a phase they are divided
    among its epochs in proportion to their training steps. A run that failed has no curve.

    Args:
        record: of a finished run; empty for one that failed.
        metrics: lines of its ``metrics.csv``.
    """
    points: list[Point] = []
    elapsed, stepped = record.get("overhead_seconds", {}).get("profiling", 0.0), 0.0
    for phase in record.get("phases", ()):
        lines = [line for line in metrics if line.get("phase") == phase["name"] and line.get("seconds")]
        last = float(lines[-1]["seconds"]) if lines else stepped
        for line in lines:
            if line.get("val_accuracy") and last > stepped:
                share = (float(line["seconds"]) - stepped) / (last - stepped)
                points.append((elapsed + share * phase["seconds"], float(line["val_accuracy"])))
        elapsed, stepped = elapsed + phase["seconds"], last
        ends = {unit.rpartition("..")[2] for unit in phase["units"]}
        exits = [each["val_accuracy"] for each in record.get("exits", ()) if each["unit"] in ends]
        if exits:
            points.append((elapsed, max([*exits, *(val for _, val in points)])))
    return [(round(seconds, 2), round(val, 4)) for seconds, val in points]


def reached(curve: Sequence[Sequence[float]], seconds: float) -> float | None:
    """Best validation accuracy of a curve by a time; None before its first point."""
    return max((point[1] for point in curve if point[0] <= seconds), default=None)


def with_spread(values: Sequence[float]) -> str:
    """Mean of shares in percent, with their standard deviation where there are several."""
    mean = f"{100 * fmean(values):.1f}" if values else "-"
    return f"{mean} ± {100 * stdev(values):.1f}" if len(values) > 1 else mean
