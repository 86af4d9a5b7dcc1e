"""``python -m benchmarks.fuzz``: fuzz for a while, say what failed, and keep it."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cyclopts import App

from benchmarks.fuzz import tally
from benchmarks.fuzz.hunt import Trial, hunt, kept_trials
from benchmarks.fuzz.readers import READERS

app = App(name="benchmarks.fuzz", help=__doc__)
_ROUND = 25


@app.default
def fuzz(
    minutes: float = 60.0,
    reader: tuple[str, ...] = (),
    seed: int = 0,
    seconds: float = 30.0,
    keep: Path = Path("fuzz-failures"),
    *,
    record: bool = False,
) -> None:
    """Fuzz readers in turn, 25 trials each, from a seed on; what failed is kept with its seed.

    Args:
        minutes: how long.
        reader: which readers; all by default.
        seed: where to begin; a trial of the same reader and seed does the same damage.
        seconds: what a trial may take before it counts as hanging.
        keep: folder for the trees of failures. A tree whose defect is mended belongs into the corpus.
        record: write the numbers into a result file, for the table of docs/reliability.md.
    """
    chosen = reader or tuple(READERS)
    end, last = time.monotonic() + 60 * minutes, [Trial(chosen[0], -1)]

    def trials() -> Iterator[Trial]:
        for trial in itertools.chain(kept_trials(chosen), _rounds(chosen, seed)):
            if time.monotonic() > end:
                return
            last[0] = trial
            yield trial

    counts = tally.Tally(keep)
    for failure in hunt(trials(), seconds):
        counts.add(last[0], failure)
    cells = counts.cells(chosen)
    print(tally.render(cells))
    if record:
        tally.record(cells, seed, minutes)
    sys.exit(1 if counts.failed else 0)


def _rounds(readers: Sequence[str], seed: int) -> Iterator[Trial]:
    for start in itertools.count(seed, _ROUND):
        for name in readers:
            yield from (Trial(name, number) for number in range(start, start + _ROUND))


if __name__ == "__main__":
    app()
