"""Counts of trials and failures, the trees of failures that are kept, and the table of ``docs/reliability.md``."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common import DEFAULTS, Cell
from benchmarks.fuzz.hunt import CORPUS, Failure, Trial
from benchmarks.fuzz.trials import prepare
from benchmarks.store import ResultFile, markdown

_ALIKE = 3


class Tally:
    """Counts trials and failures, and keeps the first few failures of a kind."""

    def __init__(self, keep: Path) -> None:
        self._keep, self.trials, self.failed = keep, Counter[str](), Counter[str]()
        self._reasons = Counter[str]()

    def add(self, trial: Trial, failure: Failure | None) -> None:
        """Count a trial."""
        self.trials[trial.reader] += 1
        if failure is None:
            return
        self.failed[trial.reader] += 1
        said = f"{trial.reader}: {(failure.reason.strip().splitlines() or [''])[-1][:160]}"
        self._reasons[said] += 1
        if self._reasons[said] <= _ALIKE:
            folder = _keep(trial, self._keep, failure.reason)
            print(f"{said} (seed {trial.seed}: {folder})", flush=True)

    def cells(self, readers: Sequence[str]) -> list[Cell]:
        """The numbers of each reader."""
        return [{"reader": name, "trials": self.trials[name], "failures": self.failed[name]} for name in readers]


def record(cells: Sequence[Cell], seed: int, minutes: float) -> None:
    """Write the numbers of a run into today's result file of this machine."""
    results = ResultFile("fuzz", replace(DEFAULTS, again=True))
    for cell in cells:
        results.once(f"{cell['reader']}, from seed {seed}, {minutes:g} minutes", lambda found=cell: found)  # type: ignore[misc]


def render(cells: list[Cell]) -> str:
    """A row for each reader, and one for all."""
    names = list(dict.fromkeys(cell["reader"] for cell in cells))
    rows = [(name, *_sums([cell for cell in cells if cell["reader"] == name])) for name in names]
    return markdown(["reader", "trials", "failures"], [*rows, ("all", *_sums(cells))])


def _sums(cells: Sequence[Cell]) -> tuple[str, str]:
    return tuple(f"{sum(cell[key] for cell in cells):,}" for key in ("trials", "failures"))  # type: ignore[return-value]


def _keep(trial: Trial, keep: Path, reason: str) -> Path:
    folder = keep / trial.reader / (trial.kept or str(trial.seed))
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    prepare(CORPUS, trial.reader, trial.seed, trial.kept, folder)
    folder.with_suffix(".txt").write_text(reason, encoding="utf-8", errors="backslashreplace")
    return folder
