"""Does training over several hosts go on when some are lost? Seeded faults in network namespaces, one launch each.

Needs root and iproute2::

    python -m benchmarks.clusterfaults --trials 50 --seed 0
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks import netns
from benchmarks.common import DEFAULTS, Cell, Options, program
from benchmarks.hostfaults import draw, run_trial
from benchmarks.store import ResultFile, finish, markdown, note, number

_INTERRUPTED = 130
"""How a launch ends that this script interrupts."""

app = program("clusterfaults")


@app.default
def main(
    options: Options = DEFAULTS, *, trials: int = 50, seed: int = 0, limit: float = 30.0, silence: str = "10s"
) -> int:
    """Run trials, those that the result file lacks; the exit code is 1 where one failed.

    Args:
        options: where results go.
        trials: how many, of the seeds from ``seed`` on.
        seed: of the first.
        limit: seconds within which training must go on.
        silence: ``--timeout`` of the launches.
    """
    reason = netns.why_not()
    if reason:
        note(reason)
        return 2
    results = ResultFile("clusterfaults", options, failed=lambda cell: not good(cell))
    cells = []
    for each in range(seed, seed + trials):
        trial = draw(each)
        command = f"seed {each}, --timeout {silence}: {trial}"
        labels = {"seed": each, "faults": str(trial), "hosts": trial.count}
        cells.append(results.once(command, lambda trial=trial: _run(trial, limit, silence), **labels))
        note(f"         {cells[-1]['went_on_seconds']} s, {cells[-1]['hosts_left']} hosts left")
    finish(results, render)
    return int(not all(good(cell) for cell in cells))


def _run(trial, limit, silence):  # type: ignore[no-untyped-def]
    with tempfile.TemporaryDirectory(prefix="snugfit-") as folder:
        try:
            found = run_trial(trial, Path(folder), limit, silence)
            note(found.pop("said", ""))
            return found
        except (TimeoutError, netns.NoNamespacesError) as error:
            return {"went_on_seconds": None, "within_limit": False, "hosts_left": 0, "leftovers": [],
                    "launch_code": None, "load": 0.0, "reason": f"the launch did not begin: {error}"}  # fmt: skip


def good(cell: Cell) -> bool:
    """Whether training went on in time, the launch ended as interrupted ones do, and nothing was left behind."""
    return bool(cell["within_limit"] and cell["launch_code"] == _INTERRUPTED and not cell["leftovers"])


def render(cells: list[Cell]) -> str:
    """A row per kind of fault."""
    rows, kinds = [], defaultdict(list)
    for cell in cells:
        kinds[cell["faults"] if cell["faults"].count(",") == 0 else "two hosts at once"].append(cell)
    for kind, found in [*sorted(kinds.items()), ("all", cells)]:
        seconds = [cell["went_on_seconds"] for cell in found if cell["went_on_seconds"] is not None]
        middle, worst = (median(seconds), max(seconds)) if seconds else (None, None)
        passed = sum(good(cell) for cell in found)
        load = median(cell["load"] for cell in found)
        rows.append((kind, len(found), len(seconds), passed, number(middle, 1), number(worst, 1), number(load, 1)))
    return markdown(("fault", "trials", "went on", "in time", "median s", "worst s", "median load"), rows)


if __name__ == "__main__":
    sys.exit(app())
