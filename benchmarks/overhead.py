"""Claim: profiling and partitioning take a small share of a 20-epoch run.

Trains for an epoch or a few and extends what was measured to 20: what happens once is counted once, and training steps
as often as there are epochs. ``snugfit plan`` as a whole (start of Python, data, profiling, partitioning) is timed too.
"""

from __future__ import annotations

from benchmarks.common import DEFAULTS, Cell, Options, Settings, program, run, to_flags
from benchmarks.store import ResultFile, finish, markdown, number, percent, succeeded

EPOCHS = 20
TARGET = 0.015

app = program("overhead")


@app.default
def main(
    *,
    models: tuple[str, ...] = ("vgg16", "vgg19", "resnet18"),
    budgets: tuple[int, ...] = (100, 300),
    max_train: int | None = None,
    max_val: int | None = None,
    epochs: int = 1,
    options: Options = DEFAULTS,
) -> None:
    """Set the time for profiling and partitioning beside that of a 20-epoch blockwise run.

    For example: python -m benchmarks.overhead --models vgg16 --budgets 100

    Args:
        models: models to train.
        budgets: memory budgets in MB.
        max_train: training images; all by default, since the share is smaller the more there are.
        max_val: validation (and test) images.
        epochs: epochs that are really trained.
        options: what every benchmark takes.
    """
    results = ResultFile("overhead", options)
    for model in models:
        for budget in budgets:
            settings = options.settings(
                model=model, strategy="blockwise", module_units="1", memory=f"{budget}MB", max_train=max_train,
                max_val=max_val, epochs=epochs,
            )  # fmt: skip
            measure(settings, results)
    finish(results, render)


def measure(settings: Settings, results: ResultFile) -> None:
    """Plan, then train."""
    plan = ["snugfit", "plan", *to_flags(settings)]

    def planned() -> Cell:
        cell = run([*plan, "--json", "--quiet"], results.options)
        del cell["output"]
        return cell

    results.once(" ".join(plan), planned, arm="plan", settings=settings)
    results.train(settings, arm="train")


def whole_run_seconds(cell: Cell, epochs: int = EPOCHS) -> float:
    """Seconds of a run of ``epochs``: everything that happens once, and the measured seconds per epoch so often."""
    return float(cell["seconds"] + cell["training_seconds"] * (epochs / cell["settings"]["epochs"] - 1))


def render(cells: list[Cell]) -> str:
    """One row per model and budget."""
    header = ("model", "budget (MB)", "training images", "profiling (s)", "snugfit plan (s)", "training (s/epoch)",
              f"{EPOCHS}-epoch run (s)", "profiling share", "snugfit plan share")  # fmt: skip
    plans = {tuple(to_flags(cell["settings"])): cell["seconds"] for cell in cells if cell["arm"] == "plan"}
    runs = [cell for cell in succeeded(cells) if cell["arm"] == "train"]
    table = markdown(header, [_row(cell, plans.get(tuple(to_flags(cell["settings"])))) for cell in runs])
    largest = max((profiling_share(cell) for cell in runs), default=None)
    return f"{table}\n\n- largest share of profiling and partitioning: {percent(largest, 2)} (target: at most 1.5 %)"


def profiling_share(cell: Cell) -> float:
    """Share of profiling and partitioning in a 20-epoch run."""
    return float(cell["record"]["overhead_seconds"]["profiling"]) / whole_run_seconds(cell)


def _row(cell: Cell, plan_seconds: float | None) -> list[str]:
    settings, whole = cell["settings"], whole_run_seconds(cell)
    return [
        settings["model"],
        settings["memory"].removesuffix("MB"),
        str(settings["max_train"] or "all"),
        number(cell["record"]["overhead_seconds"]["profiling"], 1),
        number(plan_seconds, 1),
        number(cell["training_seconds"] / settings["epochs"], 1),
        number(whole, 0),
        percent(profiling_share(cell), 2),
        percent(None if plan_seconds is None else plan_seconds / whole, 2),
    ]


if __name__ == "__main__":
    app()
