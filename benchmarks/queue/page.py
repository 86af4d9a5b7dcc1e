"""The page of results, docs/experiments.md, and the table of progress; both made from the rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks.queue.arms import CAPPED, Arm
from benchmarks.queue.curves import Point, reached, with_spread
from benchmarks.queue.estimate import duration, seconds
from benchmarks.queue.rungs import RUNGS, Row, Task, failed
from benchmarks.store import markdown, mb, middle, number, percent

INTRO = """# Long experiments

`python -m benchmarks.queue start` trains these on one core, a short run of everything before a longer one of anything:
2,000 images for 10 epochs, then 10,000 for 25, then all images for the paper's epochs. A rung is left out where the
next one is less than twice as long. Training images are what validation leaves; the two shorter rungs validate and
test on 1,000 and 2,000 images. Accuracy is the test accuracy of the epoch that validates best, for block-wise training
of the last epoch of every block, at the exit that validates best: the median over seeds, with the lowest and highest.
Near 90 % it has a standard error of 2 points on 250 test images (photos) and 0.7 on 2,000. "Best epoch" is that epoch,
of each seed, with its validation accuracy, where a strategy validates every epoch. Where a learning rate is tuned,
every arm tries the same values in its shortest run with seed 0, and the one that validates best is kept for the longer
ones; where it is the smallest or largest, the next one is tried. Arms that compute the same within any memory
(backprop, checkpoint and the peer) share the rate that is best on average. One short run cannot tell rates of a
similar accuracy apart. "Images/s" are those of an epoch of the whole network, all of its blocks included, without
validation and caching. Rows with an asterisk are of former settings and of the last epoch's weights, until the present
settings were run. A row is run again when the sources that it depends on have changed; seeds of "(2 programs)" were
trained with different sources, which may also differ in their plans. `python -m benchmarks.queue page` writes it.
"""


def page(arms: Iterable[Arm], rows: Mapping[str, Row]) -> str:
    """The whole page."""
    parts = [_experiment(title, found, list(rows.values())) for title, found in _by_experiment(arms).items()]
    return "\n\n".join([INTRO.strip(), *(part for part in parts if part)]) + "\n"


def _by_experiment(arms: Iterable[Arm]) -> dict[str, list[Arm]]:
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        found.setdefault(arm.experiment, []).append(arm)
    return found


def _experiment(title: str, arms: list[Arm], rows: list[Row]) -> str:
    if title.startswith(CAPPED):
        return _capped(title, arms, rows)
    lines = [
        _line(arm, found)
        for rung in RUNGS
        for arm in arms
        if (found := _of(rows, arm, rung))
    ]  # fmt: skip
    if not lines:
        return ""
    header = ("arm", "images", "epochs", "lr", "seeds", "test accuracy", "validation", "best epoch", "paper",
              "difference (points)", "parameters (M)", "images/s", "peak (MB)", "time", "commit")  # fmt: skip
    shown = [row for arm in arms for rung in RUNGS for row in _of(rows, arm, rung)]
    return "\n\n".join([f"## {title}", markdown(header, lines), *_on_gpus(shown)])


def _on_gpus(rows: Iterable[Row]) -> list[str]:
    """A sentence for every GPU that rows come from."""
    most: dict[tuple[str, int], int] = {}
    for row in rows:
        if "hardware" in row:
            place = row["hardware"], row["context_mb"]
            most[place] = max(most.get(place, 0), row["jobs"])
    return [
        f"Trained on one {hardware}, up to {jobs} runs side by side: times and images/s are no comparison. The memory\n"
        f"cap is above the context of {context} MB, which peaks include."
        for (hardware, context), jobs in most.items()
    ]


_CAPPED_INTRO = """
Accuracy in percent: mean and standard deviation over seeds. All train by SGD. The learning rate falls by a cosine; in
the longer rungs it first rises for an epoch (of every block, where blocks train one after another). "Equal epochs" is
the end of every run, "at T" the validation accuracy at equal seconds: T is when the last seed of backprop without a
cap ends. Of `backprop`, `checkpoint` and `peer` the best epoch counts, of all or by T; of the others the best exit of
the blocks that are trained by then ("-" before the first). Seconds include profiling and validation. The machine did
other work as well, so that the same run may take two or three times as long: they compare arms only roughly. "Gap" is
the test accuracy less that of backprop without a cap, in points. "Images a step" is the batch; of blocks, which do not
accumulate, that of each, and the number of modules. A single module is exact, so that what it gains over backprop it
gains by more steps on smaller batches, and not by local losses. `peer` is a plain PyTorch loop with the largest
micro-batch that halving finds; its BatchNorm keeps tracked statistics. What is infeasible is tried once.
""".strip()


def _capped(title: str, arms: list[Arm], rows: list[Row]) -> str:
    """A table per rung, with accuracy at equal epochs and at equal seconds, and a figure of the longest rung."""
    parts = [_capped_rung(arms, {arm.name: _of(rows, arm, rung) for arm in arms}, rung) for rung in RUNGS]
    tables = [part for part in parts if part]
    name = figure_name(title)
    figures = [f"![{title}: validation accuracy over seconds](figures/{name})"] if curves_of(arms, rows) else []
    return "\n\n".join([f"## {title}", _CAPPED_INTRO, *tables, *figures]) if tables else ""


def figure_name(title: str) -> str:
    """File name of an experiment's figure."""
    return "_".join(title.lower().replace(",", "").split()) + ".svg"


def curves_of(arms: list[Arm], rows: list[Row]) -> dict[str, dict[str, list[list[Point]]]]:
    """Curves of the longest rung that has any, by cap and method, one per seed."""
    for rung in reversed(RUNGS):
        caps: dict[str, dict[str, list[list[Point]]]] = {}
        for arm in arms:
            curves = [row["curve"] for row in _of(rows, arm, rung) if row["curve"]]
            if curves:
                cap, _, method = arm.name.partition(": ")
                caps.setdefault(cap, {})[method] = curves
        if caps:
            return caps
    return {}


def write_figures(arms: Iterable[Arm], rows: Iterable[Row], folder: Path) -> list[Path]:
    """Draw the figures that the page shows into a folder; returns their paths."""
    from benchmarks.queue.figure import draw  # matplotlib takes a second

    found, written = list(rows), []
    for title, same in _by_experiment(arms).items():
        if title.startswith(CAPPED) and (caps := curves_of(same, found)):
            written.append(folder / figure_name(title))
            draw(caps, title, written[-1])
    return written


def _capped_rung(arms: list[Arm], found: dict[str, list[Row]], rung: str) -> str:
    there = [arm for arm in arms if found[arm.name]]
    if not there:
        return ""
    free = [row for arm in there if "memory" not in arm.settings for row in _done(found[arm.name])]
    ends = [row["curve"][-1][0] for row in free if row["curve"]]
    time = max(ends, default=None)
    header = ("arm", "lr", "seeds", "test, equal epochs", "gap", "validation, equal epochs", "validation at T",
              "at T/2", "seconds", "peak (MB)", "images a step", "commit")  # fmt: skip
    lines = [
        _capped_line(_named(arm, found[arm.name]), found[arm.name], [row["test"] for row in free], time)
        for arm in there
    ]
    first = found[there[0].name][0]
    what = f"{rung} rung: {first['images']:,} images, {first['epochs']} epochs"
    return f"### {what}\n\nT = {number(time, 0)} seconds.\n\n{markdown(header, lines)}"


def _capped_line(name: str, rows: list[Row], free: list[float], time: float | None) -> list[str]:
    done, last = _done(rows), ", ".join(dict.fromkeys(row["commit"] for row in rows))
    first = [name, _rate(rows[0]), _seeds(rows)]
    if not done:
        return [*first, _failure(rows[0]), *["-"] * 7, last]
    tests, ends = [row["test"] for row in done], [row["curve"][-1][0] for row in done if row["curve"]]
    gap = 100 * (fmean(tests) - fmean(free)) if free else None
    return [
        *first, with_spread(tests), number(gap, 1), with_spread([row["val"] for row in done]),
        *(_by(done, None if time is None else part * time) for part in (1.0, 0.5)),
        number(fmean(ends) if ends else None, 0), mb(max(row["peak_bytes"] for row in done)),
        ", ".join(dict.fromkeys(map(_step_images, done))), last,
    ]  # fmt: skip


def _step_images(row: Row) -> str:
    """Images of a step, of every block; "-" if unknown."""
    chosen = row.get("chosen") or {}
    if "blocks" in chosen:
        sizes = " + ".join(str(images) for *_, images in chosen["blocks"])
        modules = len(chosen["modules"])
        return f"{sizes} in {modules} module{'s' if modules > 1 else ''}"
    return str(chosen["micro_batch"] * chosen["micro_batches"]) if "micro_batches" in chosen else "-"


def _by(rows: list[Row], time: float | None) -> str:
    """Accuracy by a time; of several seeds only if all have one by then."""
    values = [None if time is None else reached(row["curve"], time) for row in rows]
    known = [value for value in values if value is not None]
    return with_spread(known) if len(known) == len(values) else "-"


def _of(rows: list[Row], arm: Arm, rung: str) -> list[Row]:
    """Rows of an arm's rung; of several learning rates those of the one that has most seeds, or validates best.

    Rows of former settings count only where there are none of the present ones.
    """
    same = [row for row in rows if (row["experiment"], row["arm"], row["rung"]) == (arm.experiment, arm.name, rung)]
    same = [row for row in same if _is_present(row, arm)] or same
    by_rate: dict[float | None, list[Row]] = {}
    for row in same:
        by_rate.setdefault(row["lr"], []).append(row)
    return max(by_rate.values(), key=lambda each: (len(each), max(row["val"] or 0.0 for row in each)), default=[])


def _is_present(row: Row, arm: Arm) -> bool:
    """Whether a row has all settings of its arm as it is now."""
    return arm.settings.items() <= row["settings"].items()


def _named(arm: Arm, rows: list[Row]) -> str:
    return arm.name if _is_present(rows[0], arm) else f"{arm.name} *"


def _line(arm: Arm, rows: list[Row]) -> list[str]:
    rows = sorted(rows, key=lambda row: int(row["seed"]))
    done = _done(rows)
    tests = [row["test"] for row in done]
    first = [_named(arm, rows), f"{rows[0]['images']:,}", str(rows[0]["epochs"]), _rate(rows[0]), _seeds(rows)]
    last = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    if not tests:
        return [*first, _failure(rows[0]), *["-"] * 8, last]
    spread = f" ({100 * min(tests):.1f} - {100 * max(tests):.1f})" if len(tests) > 1 else ""
    gap = None if arm.paper is None else 100 * median(tests) - arm.paper
    return [
        *first, percent(median(tests)) + spread, percent(median(row["val"] for row in done)), _best(done),
        "-" if arm.paper is None else f"{arm.paper} %", number(gap), *_size_and_speed(done),
        mb(median(row["peak_bytes"] for row in done)), duration(median(row["seconds"] for row in done)), last,
    ]  # fmt: skip


def _done(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["test"] is not None]


def _failure(row: Row) -> str:
    return f"exit {row['exit_code']}: {row['error'] or ''}".splitlines()[0]


def _size_and_speed(rows: list[Row]) -> list[str]:
    """Parameters of the trained model, which may be an exit, and training images per second; medians over seeds."""
    sizes = [row["parameters"]["trained_model"] / 1e6 for row in rows if row["parameters"]]
    speeds = [row["images"] * row["epochs"] / row["training_seconds"] for row in rows if row["training_seconds"]]
    return [number(middle(sizes)), number(middle(speeds), 0)]


def _best(rows: list[Row]) -> str:
    """Where validation would have stopped, and with what accuracy, of each seed."""
    told = [row["best_epoch"] for row in rows if row["best_epoch"]]
    return ", ".join(f"{each['epoch']} ({percent(each['val'])})" for each in told) or "-"


def _rate(row: Row) -> str:
    rate = row["lr"] if row["lr"] is not None else row["settings"].get("lr")
    return "default" if rate is None else f"{rate:g}"


def _seeds(rows: list[Row]) -> str:
    """Number of seeds, and whether their sources differed, so that their spread is not one of seeds alone."""
    broken, programs = sum(row["test"] is None for row in rows), len({row["digest"] for row in rows})
    mixed = f" ({programs} programs)" if programs > 1 else ""
    return f"{len(rows)}{mixed}" + (f", {broken} without result" if broken and broken < len(rows) else "")


def progress(left: list[Task], rows: Mapping[str, Row], running: Sequence[str]) -> str:
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
        going = sum(task.key in running for task in ahead)
        counts = (len(done), sum(map(failed, done)), sum(task.stale for task in ahead), going, len(ahead))
        lines.append([name, *map(str, counts), time if ahead else "-"])
    return markdown(("rung", "done", "of these failed", "stale", "running", "left", "time left"), lines)
