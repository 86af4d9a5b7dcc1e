"""Claim: every run stays within its budget and its prediction, and an infeasible budget's error names one that works.

Trains every model under every budget with every strategy, and sets the measured peak beside budget and prediction, for
the run and for each of its phases. Where a run is infeasible, the budget that its error names is tried too.
"""

from __future__ import annotations

from benchmarks.common import (
    DEFAULTS,
    INFEASIBLE,
    Cell,
    Options,
    Settings,
    program,
    smallest_named,
    to_flags,
    train,
)
from benchmarks.store import ResultFile, finish, markdown, mb, number, percent, succeeded

TIGHT = 1.15
"""Target: predicted over measured, in 95 % of the runs."""

app = program("budgets")


@app.default
def main(
    *,
    models: tuple[str, ...] = ("vgg16", "vgg19", "resnet18"),
    budgets: tuple[int, ...] = (100, 150, 200, 250, 300, 400, 500),
    strategies: tuple[str, ...] = ("blockwise", "backprop", "checkpoint"),
    max_train: int = 256,
    max_val: int = 256,
    epochs: int = 1,
    options: Options = DEFAULTS,
) -> None:
    """Check predicted and measured peak memory against the budget.

    For example: python -m benchmarks.budgets --models vgg16 --budgets 100 300

    Args:
        models: models to train.
        budgets: memory budgets in MB.
        strategies: strategies to train with.
        max_train: training images.
        max_val: validation (and test) images.
        epochs: epochs.
        options: what every benchmark takes.
    """
    results = ResultFile("budgets", options)
    for model in models:
        for budget in budgets:
            for strategy in strategies:
                settings = options.settings(
                    model=model, strategy=strategy, module_units="1", memory=f"{budget}MB", max_train=max_train,
                    max_val=max_val, epochs=epochs,
                )  # fmt: skip
                measure(settings, results)
    finish(results, render)


def measure(settings: Settings, results: ResultFile) -> None:
    """Train once; and once more at the budget that the error names, where the first is infeasible."""
    cell = _once(settings, results, named=False)
    smallest = smallest_named(cell)
    if cell["exit_code"] == INFEASIBLE and smallest is not None:
        _once({**settings, "memory": str(smallest)}, results, named=True)


def _once(settings: Settings, results: ResultFile, *, named: bool) -> Cell:
    command = " ".join(["snugfit", "train", *to_flags(settings)])
    return results.once(command, lambda: train(settings, results.options), settings=settings, named=named)


def render(cells: list[Cell]) -> str:
    """The table of all runs, and the summary."""
    header = ("model", "strategy", "budget (MB)", "batch", "predicted (MB)", "measured (MB)", "predicted / measured")
    ordered = sorted(cells, key=lambda cell: (cell["settings"]["model"], cell["settings"]["strategy"]))
    return markdown(header, map(_row, ordered)) + "\n\n" + "\n".join(f"- {line}" for line in conclusions(cells))


def _row(cell: Cell) -> list[str]:
    settings = cell["settings"]
    memory = settings["memory"].removesuffix("MB")
    budget = f"{int(memory) / 1e6:.1f} (named)" if cell["named"] else memory
    start = [settings["model"], settings["strategy"], budget]
    if "record" not in cell:
        return [*start, "-", _failure(cell), "-", "-"]
    record = cell["record"]
    batches = ", ".join(str(phase["batch_size"]) for phase in record["phases"] if phase["units"])
    predicted, measured = record["predicted"]["peak_bytes"], record["measured"]["peak_bytes"]
    return [*start, batches, mb(predicted), mb(measured), number(predicted / measured)]


def _failure(cell: Cell) -> str:
    smallest = smallest_named(cell)
    if smallest is not None:
        return f"infeasible, needs {mb(smallest)}"
    return "timed out" if cell["exit_code"] is None else f"failed, exit {cell['exit_code']}"


def conclusions(cells: list[Cell]) -> list[str]:
    """What the cells say of the claim, one sentence each."""
    runs = [cell["record"] for cell in succeeded(cells)]
    phases = [phase for record in runs for phase in record["phases"]]
    pairs = [(record["predicted"]["peak_bytes"], record["measured"]["peak_bytes"]) for record in runs]
    phase_pairs = [(phase["predicted_peak_bytes"], phase["measured_peak_bytes"]) for phase in phases]
    within = sum(record["measured"]["peak_bytes"] <= record["budget"]["memory_bytes"] for record in runs)
    infeasible = [cell for cell in cells if cell["exit_code"] == INFEASIBLE]
    other = len(cells) - len(runs) - len(infeasible)
    return [
        f"runs: {len(runs)} finished, {len(infeasible)} infeasible, {other} failed or timed out",
        f"measured <= budget: {within} of {len(runs)} runs",
        f"measured <= predicted: {_held(pairs)} runs, {_held(phase_pairs)} phases",
        f"predicted <= {TIGHT} x measured: {_tight(pairs)} of runs (target 95 %), {_tight(phase_pairs)} of phases",
        f"infeasible budgets whose error names a budget that works: {_named_works(cells)} of {len(infeasible)}",
    ]


def _held(pairs: list[tuple[int, int]]) -> str:
    return f"{sum(measured <= predicted for predicted, measured in pairs)} of {len(pairs)}"


def _tight(pairs: list[tuple[int, int]]) -> str:
    tight = sum(predicted <= TIGHT * measured for predicted, measured in pairs)
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
