"""Reading ``metrics.csv``: one row per training step (no validation accuracy) and one per epoch (no step)."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TextIO

from snugfit._training.metrics import COLUMNS
from snugfit.errors import CheckpointError

_LONGEST = 10_000
MOST_BYTES = 2_000_000
"""Size of a file up to which every step is read: 25,000 steps take 15 MB."""


@dataclass(frozen=True)
class MetricRow:
    """One row of ``metrics.csv``; ``values`` holds the numeric columns that are filled in."""

    phase: str
    values: dict[str, float]


@dataclass(frozen=True)
class Curve:
    """One quantity over elapsed seconds in one phase."""

    phase: str
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def thinned(self, most: int, scale: float = 1) -> Curve:
        """At most ``most`` points, means over stretches of equal length; values are multiplied by ``scale``."""
        width = -(-len(self.values) // most)
        stretches = [slice(start, start + width) for start in range(0, len(self.values), width)]
        seconds = [fmean(self.seconds[stretch]) for stretch in stretches]
        return Curve(self.phase, seconds, [scale * fmean(self.values[stretch]) for stretch in stretches])


def read_metrics(path: Path) -> list[MetricRow]:
    """Read the rows in order; without a file there are none, and a cell without a finite number counts as empty.

    Steps of a long run are read as means over a few of them, because all would take hundreds of megabytes.

    Raises:
        CheckpointError: a line is longer than any row, or is no CSV.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        try:
            steps = 1 + path.stat().st_size // MOST_BYTES
            return list(_averaged((_row(cells) for cells in csv.DictReader(_lines(file))), steps))
        except (csv.Error, OSError) as error:
            raise CheckpointError(f"{path} is damaged ({error}). Restore or remove it.") from error


def _averaged(rows: Iterable[MetricRow], count: int) -> Iterator[MetricRow]:
    """Means over at most ``count`` steps of a phase that follow each other; rows of epochs as they are."""
    steps: list[MetricRow] = []
    for row in rows:
        is_step = "step" in row.values
        if steps and (not is_step or len(steps) == count or row.phase != steps[0].phase):
            yield _mean(steps)
            steps = []
        if is_step:
            steps.append(row)
        else:
            yield row
    if steps:
        yield _mean(steps)


def _mean(steps: Sequence[MetricRow]) -> MetricRow:
    names = dict.fromkeys(name for step in steps for name in step.values)
    values = {name: fmean(step.values[name] for step in steps if name in step.values) for name in names}
    return MetricRow(steps[0].phase, values)


def _lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(_LONGEST + 1):
        if len(line) > _LONGEST:
            raise csv.Error(f"a line has over {_LONGEST:,} characters")
        yield line.replace("\0", "")


def curves(rows: Iterable[MetricRow], column: str, *, epochs: bool = False, scale: float = 1) -> list[Curve]:
    """Curves of ``scale`` times ``column`` over elapsed seconds, one per phase in order of appearance.

    ``epochs`` takes the epoch rows instead of the step rows; every curve is thinned to 300 points.
    """
    found: dict[str, Curve] = {}
    for row in rows:
        if {column, "seconds"} <= row.values.keys() and epochs == ("step" not in row.values):
            curve = found.setdefault(row.phase, Curve(row.phase))
            curve.seconds.append(row.values["seconds"])
            curve.values.append(row.values[column])
    return [curve.thinned(300, scale) for curve in found.values()]


def _row(cells: dict[str, str | None]) -> MetricRow:
    values = {name: number for name in COLUMNS[1:] if (number := _number(cells.get(name))) is not None}
    return MetricRow(cells.get("phase") or "", values)


def _number(cell: str | None) -> float | None:
    try:
        value = float(cell or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
