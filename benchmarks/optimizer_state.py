"""Accuracy and memory with optimizer state or kept feature maps in fewer bits, against exact runs."""

from __future__ import annotations

from statistics import fmean, stdev

from benchmarks.common import DEFAULTS, Cell, Options, alternate, program
from benchmarks.store import ResultFile, accuracy, finish, markdown, mb, middle, succeeded

FLOAT, EXACT = "float32", "exact"
Arm = tuple[str, str, str]
"""Optimizer, type of its state, and activations."""

app = program("optimizer_state")


@app.default
def main(
    *,
    model: str = "resnet20",
    image_size: int | None = None,
    optimizers: tuple[str, ...] = ("sgd",),
    states: tuple[str, ...] = (FLOAT, "int8"),
    activations: tuple[str, ...] = (EXACT,),
    rates: tuple[float, ...] = (0.05,),
    epochs: int = 10,
    max_train: int | None = 2500,
    max_val: int | None = 3000,
    seeds: tuple[int, ...] = (0, 1, 2),
    options: Options = DEFAULTS,
) -> None:
    """Train the same network with optimizer state and activations in different types.

    For example: python -m benchmarks.optimizer_state --batch-size 64 --threads 1

    Args:
        model: model to train.
        image_size: side of an image in pixels; the data set's own by default.
        optimizers: sgd, adamw.
        states: types of optimizer state.
        activations: exact, int8, int4; with each type of optimizer state.
        rates: learning rate of each optimizer.
        epochs: epochs; a single one measures memory, and its accuracy is not shown.
        max_train: training images.
        max_val: validation (and test) images.
        seeds: seeds; the types alternate within each.
        options: what every benchmark takes.
    """
    results = ResultFile("optimizer_state", options)
    shared = options.settings(
        model=model, image_size=image_size, strategy="backprop", max_train=max_train, max_val=max_val, epochs=epochs
    )
    shared["keep"] = "last"
    kinds = [(state, kept) for state in states for kept in activations]
    arms = [(optimizer, rate, *kind) for optimizer, rate in zip(optimizers, rates, strict=True) for kind in kinds]
    for index, (optimizer, rate, state, kept) in alternate(arms, len(seeds)):
        own = {"optimizer": optimizer, "lr": rate, "seed": seeds[index], "optimizer_state": state}
        results.train({**shared, **own, "activations": None if kept == EXACT else kept})
    finish(results, render)


def render(cells: list[Cell]) -> str:
    """A table per network, batch size and length of training, with a row per optimizer and types."""
    groups: dict[str, list[Cell]] = {}
    for cell in (each for each in succeeded(cells) if "optimizer_state" in each["settings"]):
        shown = (
            "{model} on {data} at {image_size} pixels, batch size {batch_size}, {max_train} training and {max_val} "
            "test images, epochs: {epochs}"
        )
        groups.setdefault(shown.format(**cell["settings"]), []).append(cell)
    return "\n\n".join(f"**{title}**\n\n{_table(group)}" for title, group in groups.items())


def _table(cells: list[Cell]) -> str:
    arms = sorted({_arm(cell) for cell in cells}, key=lambda arm: (arm[0], arm[1] != FLOAT, arm[2] != EXACT, arm))
    accuracies = ("seeds", "test accuracy (%)", "minus exact (points)") if cells[0]["settings"]["epochs"] > 1 else ()
    header = ("optimizer", "state", "activations", *accuracies, "peak (MB)", "predicted (MB)")
    rows = [[*arm, *(_accuracies(cells, arm) if accuracies else ()), *_peaks(cells, arm)] for arm in arms]
    return markdown(header, rows)


def _arm(cell: Cell) -> Arm:
    settings = cell["settings"]
    return settings["optimizer"], settings["optimizer_state"], settings.get("activations") or EXACT


def _of(cells: list[Cell], arm: Arm) -> dict[int, Cell]:
    """The cells of an arm, by seed."""
    return {cell["settings"]["seed"]: cell for cell in cells if _arm(cell) == arm}


def _accuracies(cells: list[Cell], arm: Arm) -> list[str]:
    own, exact = _of(cells, arm), _of(cells, (arm[0], FLOAT, EXACT))
    shares = {seed: 100 * (accuracy(cell) or 0.0) for seed, cell in own.items()}
    gaps = [share - 100 * (accuracy(exact[seed]) or 0.0) for seed, share in shares.items() if seed in exact]
    same = arm[1:] == (FLOAT, EXACT) or not gaps
    return [str(len(own)), _with_spread(list(shares.values())), "-" if same else _with_spread(gaps)]


def _peaks(cells: list[Cell], arm: Arm) -> list[str]:
    """Measured and predicted; the latter is the smallest budget in which the whole batch is trained at once."""
    records = [cell["record"] for cell in _of(cells, arm).values()]
    return [mb(middle(each[kind]["peak_bytes"] for each in records)) for kind in ("measured", "predicted")]


def _with_spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


if __name__ == "__main__":
    app()
