"""Tables of the speed claim."""

from __future__ import annotations

from benchmarks.common import Cell, smallest_named
from benchmarks.store import markdown, mb, middle, number, succeeded

REFERENCE = "blockwise"
LLS = "lls-mxm"
Key = tuple[str, int, str]


def render(cells: list[Cell]) -> str:
    """Times of all arms per workload and budget, tightest budgets, and the ratios that have a target."""
    runs = [cell for cell in cells if "tightest_mb" not in cell]
    tightest = {
        (cell["settings"]["model"], cell["arm"]): cell["tightest_mb"] for cell in cells if "tightest_mb" in cell
    }
    parts = []
    for workload in dict.fromkeys(map(_workload, runs)):
        own = {arm: budget for (name, arm), budget in tightest.items() if name == workload[0]}
        parts.append(_workload_part(workload[0], [cell for cell in runs if _workload(cell) == workload], own))
    return "\n\n".join(parts)


def _workload(cell: Cell) -> tuple[str, int | None, int]:
    """What arms must have in common to be compared: model, training images, epochs."""
    settings = cell["settings"]
    return settings["model"], settings["max_train"], settings["epochs"]


def _workload_part(model: str, cells: list[Cell], tightest: dict[str, int | None]) -> str:
    settings = cells[0]["settings"]
    repeats = 1 + max(cell["repeat"] for cell in cells)
    title = (
        f"**{model}**, {settings['data']}, {settings['max_train'] or 'all'} training images, "
        f"epochs: {settings['epochs']}, repetitions: {repeats}"
    )
    header = ("budget (MB)", "arm", "seconds", "of which profiling", "training s/epoch", "time / blockwise", "batch",
              "peak (MB)")  # fmt: skip
    grouped: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault((_budget(cell), cell["arm"]), []).append(cell)
    rows = [_row(budget, arm, grouped) for budget, arm in sorted(grouped, key=lambda key: (key[0], _order(key[1])))]
    found = ", ".join(f"{arm} {'none' if budget is None else f'{budget} MB'}" for arm, budget in tightest.items())
    lines = [f"- tightest budgets: {found}"] if found else []
    lines += [f"- {line}" for line in [*conclusions(grouped, tightest), *lls_conclusions(grouped)]]
    return "\n\n".join([title, markdown(header, rows), "\n".join(lines)])


def _budget(cell: Cell) -> int:
    return int(str(cell["settings"]["memory"]).removesuffix("MB"))


def _order(arm: str) -> tuple[bool, str]:
    return (not arm.startswith(REFERENCE), arm)


def _row(budget: int, arm: str, grouped: dict[tuple[int, str], list[Cell]]) -> list[str]:
    cells = grouped[budget, arm]
    done = succeeded(cells)
    if not done:
        return [str(budget), arm, _failure(cells[-1]), *["-"] * 5]
    record, epochs = done[-1]["record"], done[-1]["settings"]["epochs"]
    profiling = middle(cell["record"].get("overhead_seconds", {}).get("profiling") for cell in done)
    training = middle(cell.get("training_seconds") for cell in done)
    return [
        str(budget),
        arm,
        number(seconds(grouped, budget, arm), 1),
        number(profiling, 1),
        number(training / epochs if training is not None else None, 1),
        number(ratio(grouped, (budget, arm), (budget, REFERENCE))),
        _batches(record),
        mb(max(cell["record"]["measured"]["peak_bytes"] for cell in done)),
    ]


def _batches(record: dict) -> str:  # type: ignore[type-arg]
    phases = [str(phase["batch_size"]) for phase in record.get("phases", ()) if phase["units"]]
    sizes = phases or [str(record["settings"]["micro_batch"])]
    groups = record["settings"].get("micro_batches", 1)
    return ", ".join(sizes) + (f" (x {groups})" if groups > 1 else "")


def _failure(cell: Cell) -> str:
    if cell["exit_code"] is None:
        return f"over {cell['seconds']:.0f} (timed out)"
    smallest = smallest_named(cell)
    if cell["exit_code"] == 3:
        return f"does not fit, needs {mb(smallest)} MB" if smallest else "does not fit"
    return f"failed, exit {cell['exit_code']}"


def seconds(grouped: dict[tuple[int, str], list[Cell]], budget: int, arm: str) -> float | None:
    """Median seconds of a whole command; None where it did not finish."""
    return middle(cell["seconds"] for cell in succeeded(grouped.get((budget, arm), [])))


def ratio(grouped: dict[tuple[int, str], list[Cell]], slow: tuple[int, str], fast: tuple[int, str]) -> float | None:
    """Seconds of one arm over those of another, each a pair of budget and name."""
    above, below = seconds(grouped, *slow), seconds(grouped, *fast)
    return None if above is None or below is None else above / below


def conclusions(grouped: dict[tuple[int, str], list[Cell]], tightest: dict[str, int | None]) -> list[str]:
    """The ratios that have a target, each with it."""
    lines = []
    for arm, fast, target in (
        ("backprop-single", "blockwise", "at least 3; the paper 2.3 to 6.1 over its budgets"),
        ("backprop-single", "blockwise-stop", "over 6.1"),
        ("backprop", "blockwise", "at least 3"),
        ("backprop", "blockwise-stop", "over 6.1"),
        ("classic", "blockwise", "at least 3.3"),
    ):
        for budget in sorted({budget for budget, name in grouped if name == arm}):
            found, is_tightest = ratio(grouped, (budget, arm), (budget, fast)), budget == tightest.get(arm)
            if found is not None:
                where = f"{budget} MB, the tightest of {arm}" if is_tightest else f"{budget} MB"
                aim = f"target: {target}" if is_tightest else f"target at the tightest budget of {arm}: {target}"
                lines.append(f"{arm} / {fast} at {where}: {number(found)} ({aim})")
    for budget in sorted({budget for budget, arm in grouped if arm == "checkpoint" and budget < 200}):
        found = ratio(grouped, (budget, "checkpoint"), (budget, REFERENCE))
        if found is not None:
            lines.append(f"checkpoint / blockwise at {budget} MB: {number(found)} (target: over 1)")
    for arm in ("backprop-single", "backprop"):
        for fast, target in (("blockwise-stop", "at least 1.3"), ("blockwise", "reported")):
            found = ratio(grouped, (500, arm), (100, fast))
            if found is not None:
                lines.append(f"{arm} at 500 MB / {fast} at 100 MB: {number(found)} (target: {target})")
    return lines


def lls_conclusions(grouped: dict[tuple[int, str], list[Cell]]) -> list[str]:
    """Training seconds per epoch of the other ways over those of LLS-MxM, without caches and profiling on any side."""
    lines = []
    for arm, target in (("blockwise", "at least 1.8"), ("backprop-single", "at least 5 at the tightest")):
        for budget in sorted({budget for budget, name in grouped if name == arm}):
            found = _training_ratio(grouped, (budget, arm), (budget, LLS))
            if found is not None:
                lines.append(f"{arm} / {LLS} per epoch at {budget} MB: {number(found)} (target: {target})")
    for arm in ("backprop-single", "backprop"):
        found = _training_ratio(grouped, (500, arm), (100, LLS))
        if found is not None:
            lines.append(f"{arm} at 500 MB / {LLS} at 100 MB, per epoch: {number(found)} (target: at least 1.3)")
    return lines


def _training_ratio(
    grouped: dict[tuple[int, str], list[Cell]], slow: tuple[int, str], fast: tuple[int, str]
) -> float | None:
    above, below = (
        middle(cell.get("training_seconds") for cell in succeeded(grouped.get(key, []))) for key in (slow, fast)
    )
    return None if above is None or below is None else above / below
