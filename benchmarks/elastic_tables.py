"""Tables of the claims about ``elastic``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from benchmarks.common import Cell
from benchmarks.store import accuracy, markdown, mb, number, percent, succeeded

TARGETS = (0.02, 0.05, 0.1)
"""Points below full training's best validation accuracy at which time to accuracy is told."""


def render(cells: list[Cell]) -> str:
    """All tables for which there are results."""
    parts = []
    for arm, table in _TABLES.items():
        found = [cell for cell in cells if cell["arm"] == arm]
        if found:
            parts.append(table(found))
    return "\n\n".join(parts)


def _models(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        plain = [abs(each["predicted"] / each["measured"] - 1) for each in cell["selections"]]
        steady = _steady(cell)
        rows.append((
            cell["settings"]["model"], cell["settings"]["batch_size"], len(plain), percent(median(plain)),
            percent(max(plain)), percent(median(steady) if steady else None), percent(max(steady, default=None)),
            f"{cell['profile_seconds']:.0f} s",
        ))  # fmt: skip
    header = (
        "network", "batch", "selections", "median error (target 5 %)", "worst (target 15 %)", "median at steady speed",
        "worst at steady speed", "profiling",
    )  # fmt: skip
    about = (
        "**Step time of random selections, predicted against measured.** This machine changes its speed from minute "
        "to minute, so a forward pass is timed next to every step. At steady speed: all steps are told in such passes, "
        "over those of a step that trains the classifier alone.\n\n"
    )
    return about + markdown(header, rows)


def _steady(cell: Cell) -> list[float]:
    """Errors of predicted steps over the least one; none where no forward passes were timed beside the steps."""
    least = cell.get("least")
    if least is None:
        return []
    return [
        abs(each["predicted"] / least["predicted"] / (each["passes"] / least["passes"]) - 1)
        for each in cell["selections"]
    ]


def _ratios(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        for each in cell["ratios"]:
            if "smallest" in each:
                rows.append(
                    (cell["settings"]["model"], each["rho"], f"infeasible, smallest {each['smallest']:.3f}", "", "")
                )
                continue
            achieved = each["selected"] / each["full"]
            rows.append((
                cell["settings"]["model"], each["rho"], number(each["predicted"], 3), number(achieved, 3),
                each["tensors"],
            ))  # fmt: skip
    header = ("network", "rho", "predicted", "achieved (target: within 0.05)", "tensors")
    return "**Step time over that of stock full training, measured in turns.**\n\n" + markdown(header, rows)


def _solvers(cells: list[Cell]) -> str:
    rows = [
        (
            cell["settings"]["model"], cell["tensors"], f"{1000 * median(cell['one_budget']):.1f} ms",
            f"{1000 * median(cell['two_budgets']):.0f} ms", f"{1000 * max(cell['two_budgets']):.0f} ms",
            number(median(cell["one_budget"]) / cell["step_seconds"], 3),
        )
        for cell in cells
    ]  # fmt: skip
    header = (
        "network",
        "tensors",
        "one budget",
        "two budgets, median",
        "two budgets, worst",
        "one budget, in steps at rho 0.5",
    )
    return "**Solving for a selection.**\n\n" + markdown(header, rows)


def _similarities(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        by_lag, by_batch = cell["by_lag"], cell["by_batch"]
        rows += [(cell["settings"]["model"], f"{lag} epochs later", number(value, 3)) for lag, value in by_lag.items()]
        rows += [
            (cell["settings"]["model"], f"{size} images, two draws", number(value, 3))
            for size, value in by_batch.items()
        ]
    header = ("network", "compared", "cosine similarity of importances")
    return "**How importance changes with the interval and with the batch (Figure 7).**\n\n" + markdown(header, rows)


def _memory(cells: list[Cell]) -> str:
    done = succeeded(cells)
    full = next((c for c in done if c["settings"]["scheme"] == "full" and not c["settings"]["lean"]), None)
    reference = full["record"]["measured"]["peak_bytes"] if full else None
    rows = []
    for cell in done:
        settings, record = cell["settings"], cell["record"]
        interval, measured = record["intervals"][0], record["measured"]
        rows.append((
            settings["scheme"], "lean" if settings["lean"] else "stock", settings.get("memory", "-"),
            mb(interval["analytic_peak_bytes"]), mb(measured["tensor_peak_bytes"]),
            mb(record["predicted"]["peak_bytes"]),
            mb(measured["peak_bytes"]), number(reference / measured["peak_bytes"] if reference else None),
        ))  # fmt: skip
    header = (
        "scheme", "operators", "budget", "analytic, tensors (MB)", "measured, tensors (MB)", "predicted peak (MB)",
        "measured peak (MB)", "full training's over it",
    )  # fmt: skip
    return "**Memory.** Peak is RssAnon above the baseline, ranking pass included.\n\n" + markdown(header, rows)


def _finetunes(cells: list[Cell]) -> str:
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in succeeded(cells):
        settings = cell["settings"]
        groups.setdefault((settings["model"], settings["data"], settings["image_size"], settings["epochs"]), []).append(
            cell
        )
    return "\n\n".join(_finetune(key, group) for key, group in groups.items())


def _finetune(key: tuple[Any, ...], cells: list[Cell]) -> str:
    full = next((cell for cell in cells if cell["settings"]["scheme"] == "full"), None)
    rows = []
    for cell in cells:
        record = cell["record"]
        steps = [interval["measured_seconds"] for interval in record["intervals"]]
        seconds = record["measured"]["seconds"]
        share = sum(record["overhead_seconds"].values()) / (seconds + record["overhead_seconds"]["profiling"])
        rows.append((
            scheme_name(cell["settings"]), percent(accuracy(cell)), percent(record["accuracy"]["val"]),
            f"{seconds:.0f} s", number(full["record"]["measured"]["seconds"] / seconds if full else None),
            f"{1000 * median(steps):.0f} ms", number(median(steps) / record["intervals"][0]["full_seconds"]),
            mb(record["measured"]["peak_bytes"]), percent(share), *_times(cell, full),
        ))  # fmt: skip
    header = (
        "scheme", "test", "validation", "training", "speed-up", "step", "of full", "peak (MB)",
        "profiling and selection",
        *(f"s to full's best - {100 * below:.0f} points" for below in TARGETS),
    )  # fmt: skip
    model, data, size, epochs = key
    return f"**{model} on {data}, {size} pixels, {epochs} epochs.**\n\n" + markdown(header, rows)


def scheme_name(settings: dict[str, Any]) -> str:
    """A scheme with what it ranks by, where that is not the paper's metric."""
    metric = settings.get("importance")
    return f"{settings['scheme']} by {metric}" if metric else str(settings["scheme"])


def _times(cell: Cell, full: Cell | None) -> Iterable[str]:
    """Seconds to validation accuracies a little below full training's best."""
    if full is None:
        return ("-",) * len(TARGETS)
    best = max(epoch["val_accuracy"] for epoch in full["epochs"])
    reached = [next((e["seconds"] for e in cell["epochs"] if e["val_accuracy"] >= best - b), None) for b in TARGETS]
    return [number(seconds, 0) for seconds in reached]


_TABLES: dict[str, Callable[[list[Cell]], str]] = {
    "model": _models,
    "ratio": _ratios,
    "solver": _solvers,
    "similarity": _similarities,
    "memory": _memory,
    "finetune": _finetunes,
}
