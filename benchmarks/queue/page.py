"""The page of results, docs/experiments.md, and the table of progress; both made from the rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from benchmarks.queue.arms import Arm
from benchmarks.queue.estimate import duration, seconds
from benchmarks.queue.rungs import RUNGS, Row, Task, failed
from benchmarks.store import markdown, mb, number, percent

INTRO = """# Long experiments

`python -m benchmarks.queue start` trains these on one core, a short run of everything before a longer one of anything:
2,000 images for 10 epochs, then 10,000 for 25, then all images for the paper's epochs. A rung is left out where the
next one is less than twice as long. Training images are what validation leaves; the two shorter rungs validate and test
on 1,000 and 2,000 images. Accuracy is the test accuracy of the last weights, for block-wise training at the exit that
validates best: the median over seeds, with the lowest and highest. "Best epoch" is the one that validated best, of each
seed, with that accuracy, where a strategy validates every epoch: where it is far above "validation", a run was too long
or its rate too high. Where a learning rate is tuned, every arm tries the same values in its shortest run with seed 0,
and keeps the one that validates best.
A row is run again when the sources that it depends on have changed. `python -m benchmarks.queue page` writes this page.
"""


def page(arms: Iterable[Arm], rows: Mapping[str, Row]) -> str:
    """The whole page."""
    by_experiment: dict[str, list[Arm]] = {}
    for arm in arms:
        by_experiment.setdefault(arm.experiment, []).append(arm)
    parts = [_experiment(title, found, list(rows.values())) for title, found in by_experiment.items()]
    return "\n\n".join([INTRO.strip(), *(part for part in parts if part)]) + "\n"


def _experiment(title: str, arms: list[Arm], rows: list[Row]) -> str:
    lines = [
        _line(arm, found)
        for rung in RUNGS
        for arm in arms
        if (found := _of(rows, arm, rung))
    ]  # fmt: skip
    if not lines:
        return ""
    header = ("arm", "images", "epochs", "lr", "seeds", "test accuracy", "validation", "best epoch", "paper",
              "difference (points)", "peak (MB)", "time", "commit")  # fmt: skip
    return f"## {title}\n\n{markdown(header, lines)}"


def _of(rows: list[Row], arm: Arm, rung: str) -> list[Row]:
    """Rows of an arm's rung; of several learning rates those of the one that has most seeds, or validates best."""
    same = [row for row in rows if (row["experiment"], row["arm"], row["rung"]) == (arm.experiment, arm.name, rung)]
    by_rate: dict[float | None, list[Row]] = {}
    for row in same:
        by_rate.setdefault(row["lr"], []).append(row)
    return max(by_rate.values(), key=lambda each: (len(each), max(row["val"] or 0.0 for row in each)), default=[])


def _line(arm: Arm, rows: list[Row]) -> list[str]:
    rows = sorted(rows, key=lambda row: int(row["seed"]))
    tests = [row["test"] for row in rows if row["test"] is not None]
    first = [arm.name, f"{rows[0]['images']:,}", str(rows[0]["epochs"]), _rate(rows[0]), _seeds(rows)]
    last = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    if not tests:
        return [*first, f"exit {rows[0]['exit_code']}: {rows[0]['error'] or ''}".splitlines()[0], *["-"] * 6, last]
    spread = f" ({100 * min(tests):.1f} - {100 * max(tests):.1f})" if len(tests) > 1 else ""
    gap = None if arm.paper is None else 100 * median(tests) - arm.paper
    done = [row for row in rows if row["test"] is not None]
    return [
        *first, percent(median(tests)) + spread, percent(median(row["val"] for row in done)), _best(done),
        "-" if arm.paper is None else f"{arm.paper} %", number(gap), mb(median(row["peak_bytes"] for row in done)),
        duration(median(row["seconds"] for row in done)), last,
    ]  # fmt: skip


def _best(rows: list[Row]) -> str:
    """Where validation would have stopped, and with what accuracy, of each seed."""
    told = [row["best_epoch"] for row in rows if row["best_epoch"]]
    return ", ".join(f"{each['epoch']} ({percent(each['val'])})" for each in told) or "-"


def _rate(row: Row) -> str:
    rate = row["lr"] if row["lr"] is not None else row["settings"].get("lr")
    return "default" if rate is None else f"{rate:g}"


def _seeds(rows: list[Row]) -> str:
    broken = sum(row["test"] is None for row in rows)
    return f"{len(rows)}" + (f", {broken} without result" if broken and broken < len(rows) else "")


def progress(left: list[Task], rows: Mapping[str, Row], running: str | None) -> str:
    """One line per rung: what is done, failed, stale and left, and the time left at the measured seconds per image."""
    lines = []
    for rung, name in enumerate(RUNGS):
        ahead = [task for task in left if task.rung == rung]
        done = [row for row in rows.values() if row["rung"] == name]
        spent = [seconds(task, rows.values()) for task in ahead]
        known = [each for each in spent if each is not None]
        time = (
            duration(sum(known))
            if len(known) == len(spent)
            else f"{duration(sum(known))}, {len(spent) - len(known)} unknown"
        )
        going = sum(task.key == running for task in ahead)
        counts = (len(done), sum(map(failed, done)), sum(task.stale for task in ahead), going, len(ahead))
        lines.append([name, *map(str, counts), time if ahead else "-"])
    return markdown(("rung", "done", "of these failed", "stale", "running", "left", "time left"), lines)
