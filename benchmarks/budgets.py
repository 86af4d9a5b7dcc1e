"""Claim: every run stays within its budget and its prediction, and an infeasible budget's error names one that works.

Trains every model under every budget with every strategy, and compares the measured peak with budget and prediction,
for the run and for each of its phases. If a run is infeasible, the budget that its error names is tried too.

How tight a prediction is, is judged without its room for freed memory that the heap keeps between steps: a run uses
that for speed, if at all, and more of it the longer it is.
"""

from __future__ import annotations

from typing import Any

from benchmarks.common import DEFAULTS, INFEASIBLE, Cell, Options, Settings, program, smallest_named, to_flags
from benchmarks.store import ResultFile, finish, markdown, mb, number, percent, succeeded

TIGHT = {1.05: 90, 1.10: 99}
"""Targets: predicted over measured, at most in this percentage of runs and of phases."""

app = program("budgets")


@app.default
def main(
    *,
    models: tuple[str, ...] = ("vgg16", "vgg19", "resnet18"),
    budgets: tuple[int, ...] = (100, 150, 200, 250, 300, 400, 500),
    strategies: tuple[str, ...] = ("blockwise", "backprop", "checkpoint"),
    max_train: int = 256,
    max_val: int = 256,
    image_size: int | None = None,
    options: Options = DEFAULTS,
) -> None:
    """Check predicted and measured peak memory against the budget.

    For example: python -m benchmarks.budgets --models vgg16 --budgets 100 300

    Args:
        models: models to train.
        budgets: memory budgets in MB.
        strategies: strategies to train with; blockwise/lls-mxm is blockwise with that local loss.
        max_train: training images.
        max_val: validation (and test) images.
        image_size: side of the images; the data set's own by default.
        options: what every benchmark takes.
    """
    results = ResultFile("budgets", options)
    for model in models:
        for budget in budgets:
            for strategy in strategies:
                name, _, loss = strategy.partition("/")
                units = "1" if name == "blockwise" else None
                settings = options.settings(
                    model=model, strategy=name, local_loss=loss or None, module_units=units, memory=f"{budget}MB",
                    image_size=image_size, max_train=max_train, max_val=max_val, epochs=1,
                )  # fmt: skip
                measure(settings, results)
    finish(results, render)


def measure(settings: Settings, results: ResultFile) -> None:
    """Train once; and once more at the budget that the error names, where the first is infeasible.

    The settings have the budget as ``memory`` or ``total_memory``.
    """
    cell = results.train(settings, named=False)
    smallest = smallest_named(cell)
    if cell["exit_code"] == INFEASIBLE and smallest is not None:
        budget = "memory" if settings.get("memory") else "total_memory"
        results.train({**settings, budget: str(smallest)}, named=True)


def render(cells: list[Cell]) -> str:
    """The table of all runs, and the summary."""
    header = (
        "model", "strategy", "budget (MB)", "batch", "predicted (MB)", "of it kept", "measured (MB)",
        "predicted without kept / measured", "loosest phase",
    )  # fmt: skip
    ordered = sorted(cells, key=lambda cell: (cell["settings"]["model"], cell["settings"]["strategy"]))
    return markdown(header, map(_row, ordered)) + "\n\n" + "\n".join(f"- {line}" for line in conclusions(cells))


def _row(cell: Cell) -> list[str]:
    settings = cell["settings"]
    memory = settings["memory"].removesuffix("MB")
    budget = f"{int(memory) / 1e6:.1f} (named)" if cell["named"] else memory
    types = {"state": settings.get("optimizer_state"), "weights": settings.get("weight_dtype")}
    variant = settings.get("local_loss") or ", ".join(f"{kind} {what}" for what, kind in types.items() if kind)
    start = [settings["model"], settings["strategy"] + (f" ({variant})" if variant else ""), budget]
    if "record" not in cell:
        return [*start, "-", _failure(cell), *["-"] * 4]
    record = cell["record"]
    batches = ", ".join(str(phase["batch_size"]) for phase in record["phases"] if phase["units"])
    predicted, measured = record["predicted"]["peak_bytes"], record["measured"]["peak_bytes"]
    needed = _needed(record)
    loosest = max(record["phases"], key=_looseness)
    phase = f"{number(_looseness(loosest))} ({loosest['name'].partition(':')[0]})"
    return [*start, batches, mb(predicted), mb(predicted - needed), mb(measured), number(needed / measured), phase]


def _needed(record: dict[str, Any]) -> int:
    """Predicted peak of a run without kept memory."""
    phases = record["phases"]
    if not any(phase.get("predicted_kept_bytes") for phase in phases):
        return int(record["predicted"]["peak_bytes"])
    return max(map(_needed_in, phases))


def _needed_in(phase: dict[str, Any]) -> int:
    """The same of a phase; records of 0.2.0 and earlier do not tell what is kept."""
    return int(phase["predicted_peak_bytes"]) - int(phase.get("predicted_kept_bytes", 0))


def _looseness(phase: dict[str, Any]) -> float:
    return _needed_in(phase) / float(phase["measured_peak_bytes"])


def _failure(cell: Cell) -> str:
    smallest = smallest_named(cell)
    if smallest is not None:
        return f"infeasible, needs {mb(smallest)}"
    return "timed out" if cell["exit_code"] is None else f"failed, exit {cell['exit_code']}"


def _target(limit: float) -> str:
    return f"predicted without kept <= {limit:.2f} x measured (target {TIGHT[limit]} %)"


def conclusions(cells: list[Cell]) -> list[str]:
    """What the cells say of the claim, one sentence each."""
    runs = [cell["record"] for cell in succeeded(cells)]
    phases = [phase for record in runs for phase in record["phases"]]
    pairs = [(record["predicted"]["peak_bytes"], record["measured"]["peak_bytes"]) for record in runs]
    phase_pairs = [(phase["predicted_peak_bytes"], phase["measured_peak_bytes"]) for phase in phases]
    needed = [(_needed(record), record["measured"]["peak_bytes"]) for record in runs]
    phase_needed = [(_needed_in(phase), phase["measured_peak_bytes"]) for phase in phases]
    within = sum(record["measured"]["peak_bytes"] <= record["budget"]["memory_bytes"] for record in runs)
    infeasible = [cell for cell in cells if cell["exit_code"] == INFEASIBLE]
    other = len(cells) - len(runs) - len(infeasible)
    return [
        f"runs: {len(runs)} finished, {len(infeasible)} infeasible, {other} failed or timed out",
        f"measured <= budget: {within} of {len(runs)} runs",
        f"measured <= predicted: {_held(pairs)} runs, {_held(phase_pairs)} phases",
        *(
            f"{_target(limit)}: {_tight(needed, limit)} of runs, {_tight(phase_needed, limit)} of phases"
            for limit in TIGHT
        ),
        f"infeasible budgets whose error names a budget that works: {_named_works(cells)} of {len(infeasible)}",
    ]


def _held(pairs: list[tuple[int, int]]) -> str:
    return f"{sum(measured <= predicted for predicted, measured in pairs)} of {len(pairs)}"


def _tight(pairs: list[tuple[int, int]], limit: float) -> str:
    tight = sum(predicted <= limit * measured for predicted, measured in pairs)
    return percent(tight / len(pairs)) if pairs else "none"


def _named_works(cells: list[Cell]) -> int:
    """Infeasible cells for which the run at the named budget finished."""
    worked = {_identity(cell["settings"]) for cell in succeeded(cells)}
    infeasible = [cell for cell in cells if cell["exit_code"] == INFEASIBLE]
    return sum(_identity({**cell["settings"], "memory": str(smallest_named(cell))}) in worked for cell in infeasible)


def _identity(settings: Settings) -> tuple[str, ...]:
    return tuple(to_flags(settings))


if __name__ == "__main__":
    app()
