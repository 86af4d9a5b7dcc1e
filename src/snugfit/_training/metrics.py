"""metrics.csv: one row per step and per epoch, kept consistent with the checkpoint that a run resumes from."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

from snugfit._storage.digests import Digester, FileDigest
from snugfit._training.events import EpochDone, Event, StepDone

METRICS_FILE = "metrics.csv"
COLUMNS = (
    *("phase", "epoch", "step", "loss", "accuracy", "val_accuracy", "lr", "seconds"),
    *("current_bytes", "peak_bytes", "map50"),
)
"""Columns of ``metrics.csv``; ``seconds`` is the time since the run began. Any cell may be empty."""


class MetricsWriter:
    """Subscriber that writes training steps and epochs; ``seconds`` is the time since the run began.

    ``val_accuracy`` holds what validation measures, mAP50 too, which stands in ``map50`` besides.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seconds = 0.0
        self._digester = Digester()

    def __call__(self, event: Event) -> None:
        """Write the event's row, if it has one."""
        if isinstance(event, StepDone):
            self._seconds += event.seconds
            memory = (event.current_bytes, event.peak_bytes)
            self._write(
                event.phase, event.epoch, event.step, _short(event.loss), _short(event.accuracy), "", _short(event.lr),
                _short(self._seconds), *memory, "",
            )  # fmt: skip
        elif isinstance(event, EpochDone):
            validation = _short(event.val_accuracy)
            self._write(
                event.phase, event.epoch, "", _short(event.loss), _short(event.accuracy), validation, "",
                _short(self._seconds), "", "", validation if event.metric == "mAP50" else "",
            )  # fmt: skip

    def offset(self) -> int:
        """Bytes written so far; a checkpoint keeps it."""
        return self.path.stat().st_size if self.path.exists() else 0

    def written(self, *, grows: bool = True) -> dict[Path, FileDigest]:
        """The file and its digest up to now, for the run's manifest; the file is on disk then."""
        if not self.path.exists():
            return {}
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return {self.path: self._digester.digest(grows=grows)}

    def truncate(self, offset: int) -> None:
        """Forget the rows after ``offset``: the steps they tell of will be run again; and a row that was cut off."""
        self._digester, self._seconds = Digester(), 0.0
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            kept = file.read(offset)
            kept = kept[: kept.rfind(b"\n") + 1]
            file.truncate(len(kept))
        self._digester.write(kept)
        rows = list(csv.DictReader(kept.decode().splitlines()))
        self._seconds = float(rows[-1]["seconds"] or 0.0) if rows else 0.0

    def _write(self, *values: Any) -> None:
        text = io.StringIO()
        writer = csv.writer(text)
        if self.offset() == 0:
            writer.writerow(COLUMNS)
        writer.writerow(values)
        with self.path.open("a", newline="") as file:
            file.write(text.getvalue())
        self._digester.write(text.getvalue())


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
