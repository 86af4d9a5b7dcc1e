"""``python -m benchmarks.fuzz``: fuzz for a while, say what failed, and keep it."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from cyclopts import App

from benchmarks.fuzz.hunt import CORPUS, Failure, Trial, hunt, kept_trials
from benchmarks.fuzz.readers import READERS
from benchmarks.fuzz.trials import prepare

app = App(name="benchmarks.fuzz", help=__doc__)
_ROUND = 25
_ALIKE = 3


@app.default
def fuzz(
    minutes: float = 60.0,
    reader: tuple[str, ...] = (),
    seed: int = 0,
    seconds: float = 30.0,
    keep: Path = Path("fuzz-failures"),
) -> None:
    """Fuzz readers in turn, 25 trials each, from a seed on; what failed is kept with its seed.

    Args:
        minutes: how long.
        reader: which readers; all by default.
        seed: where to begin; a trial of the same reader and seed does the same damage.
        seconds: what a trial may take before it counts as hanging.
        keep: folder for the trees of failures. A tree whose defect is mended belongs into the corpus.
    """
    chosen = reader or tuple(READERS)
    end, last = time.monotonic() + 60 * minutes, [Trial(chosen[0], -1)]

    def trials() -> Iterator[Trial]:
        for trial in itertools.chain(kept_trials(chosen), _rounds(chosen, seed)):
            if time.monotonic() > end:
                return
            last[0] = trial
            yield trial

    table = _Table(keep)
    for failure in hunt(trials(), seconds):
        table.add(last[0], failure)
    table.show(chosen)
    sys.exit(1 if table.failed else 0)


def _rounds(readers: Sequence[str], seed: int) -> Iterator[Trial]:
    for start in itertools.count(seed, _ROUND):
        for name in readers:
            yield from (Trial(name, number) for number in range(start, start + _ROUND))


class _Table:
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

    def show(self, readers: Sequence[str]) -> None:
        """Print the numbers of each reader."""
        print(f"{'reader':20} {'trials':>8} {'failures':>8}")
        for name in (*readers, "all"):
            done, failed = (
                sum(found.values()) if name == "all" else found[name] for found in (self.trials, self.failed)
            )
            print(f"{name:20} {done:8,} {failed:8,}")


def _keep(trial: Trial, keep: Path, reason: str) -> Path:
    folder = keep / trial.reader / (trial.kept or str(trial.seed))
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    prepare(CORPUS, trial.reader, trial.seed, trial.kept, folder)
    folder.with_suffix(".txt").write_text(reason, encoding="utf-8", errors="backslashreplace")
    return folder


if __name__ == "__main__":
    app()
