"""metrics.csv: one row per step and per epoch, kept consistent with the checkpoint that a run resumes from."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snugfit._storage.digests import Digester, FileDigest
from snugfit._storage.write_errors import storage_errors
from snugfit._training.events import EpochDone, Event, StepDone

METRICS_FILE = "metrics.csv"
COLUMNS = (
    *("phase", "epoch", "step", "loss", "accuracy", "val_accuracy", "lr", "seconds"),
    *("current_bytes", "peak_bytes", "map50"),
)
"""Columns of ``metrics.csv``, before those of metrics from Python, ``val/NAME``; ``seconds`` is the time since the run
began. Any cell may be empty."""


class MetricsWriter:
    """Subscriber that writes training steps and epochs; ``seconds`` is the time since the run began.

    ``val_accuracy`` contains the validation measure; mAP50 also appears in ``map50``.
    """

    def __init__(self, path: Path, metrics: Sequence[str] = ()) -> None:
        self.path = path
        self._columns = (*COLUMNS, *(f"val/{name}" for name in metrics))
        self._seconds = 0.0
        self._digester = Digester()

    def __call__(self, event: Event) -> None:
        """Write the event's row, if it has one.

        Raises:
            OutOfStorageError, CheckpointError: it cannot be written.
        """
        if isinstance(event, StepDone):
            self._seconds += event.seconds
            sizes = {"current_bytes": event.current_bytes, "peak_bytes": event.peak_bytes}
            self._write(event, step=event.step, lr=_short(event.lr), **sizes)
        elif isinstance(event, EpochDone):
            validation = _short(event.val_accuracy)
            own = {f"val/{name}": _short(value) for name, value in event.metrics.items()}
            self._write(event, val_accuracy=validation, map50=validation if event.metric == "mAP50" else "", **own)

    def offset(self) -> int:
        """Bytes written so far; a checkpoint keeps it."""
        return self.path.stat().st_size if self.path.exists() else 0

    def written(self, *, grows: bool = True) -> dict[Path, FileDigest]:
        """The flushed file and its current digest, for the run's manifest."""
        if not self.path.exists():
            return {}
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return {self.path: self._digester.digest(grows=grows)}

    def truncate(self, offset: int) -> None:
        """Remove the rows after ``offset``, whose steps will run again, and an incomplete row."""
        self._digester, self._seconds = Digester(), 0.0
        if not self.path.exists():
            return
        header, last, end = "", "", 0
        with self.path.open("r+b") as file:  # line by line: the rows of a long run take more than a small budget
            while (line := file.readline(offset - end)).endswith(b"\n"):
                self._digester.write(line)
                header, last, end = header or line.decode(), line.decode(), end + len(line)
            file.truncate(end)
        if last != header:  # a run of an earlier version may have fewer columns
            self._columns, cells = (tuple(next(csv.reader([line]))) for line in (header, last))
            self._seconds = float(dict(zip(self._columns, cells, strict=False))["seconds"] or 0.0)

    def _write(self, event: StepDone | EpochDone, **cells: Any) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", extrasaction="ignore")
        if self.offset() == 0:
            writer.writeheader()
        cells |= {"loss": _short(event.loss), "accuracy": _short(event.accuracy), "seconds": _short(self._seconds)}
        writer.writerow({"phase": event.phase, "epoch": event.epoch, **cells})
        with storage_errors(self.path), self.path.open("a", newline="") as file:
            file.write(text.getvalue())
        self._digester.write(text.getvalue())


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
