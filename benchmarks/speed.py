"""Claim: under the same enforced budget, blockwise training takes less time than the ways it competes with.

Every arm trains on the same images for the same epochs, as one command from start to end: profiling, caching and exit
selection included. Beside the given budgets, all arms run at the tightest budget in which backprop, checkpointing and
classic local learning each still train.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.common import (
    DEFAULTS,
    Cell,
    Options,
    Settings,
    alternate,
    program,
    run,
    smallest_named,
    to_flags,
    train,
)
from benchmarks.speed_tables import render
from benchmarks.store import ResultFile, finish, note

MB = 10**6
STOCK = "stock"
_UNITS: Settings = {"strategy": "blockwise", "module_units": "1"}
ARMS: dict[str, Settings] = {
    "blockwise": _UNITS | {"local_loss": "aan"},
    "blockwise-stop": _UNITS | {"local_loss": "aan", "saturation_stop": True},
    "lls-mxm": _UNITS | {"local_loss": "lls-mxm", "optimizer": "schedulefree"},
    "backprop-single": {"strategy": "backprop", "accumulate": False},
    "backprop": {"strategy": "backprop"},
    "checkpoint": {"strategy": "checkpoint"},
    "classic": _UNITS | {"local_loss": "classic", "residency": "all", "adaptive_batch": False},
    STOCK: {},
}
TIGHTEST_OF = ("backprop-single", "backprop", "checkpoint", "classic")

app = program("speed")


@app.default
def main(
    *,
    model: str = "vgg16",
    budgets: tuple[int, ...] = (100, 150, 200, 300, 500),
    arms: tuple[str, ...] = tuple(ARMS),
    tightest: tuple[str, ...] = TIGHTEST_OF,
    resolution: int = 4,
    max_train: int | None = 2560,
    max_val: int | None = 1000,
    epochs: int = 3,
    seed: int = 0,
    repeats: int = 1,
    options: Options = DEFAULTS,
) -> None:
    """Time whole runs side by side under the same budgets.

    The arms: blockwise, blockwise-stop (with the saturation stop), lls-mxm (with that local loss and the optimizer of
    its authors), backprop-single (no accumulation: one step per batch that fits, the baseline of NeuroFlux), backprop
    (accumulating to the batch size), checkpoint, classic (local learning with 256 filters everywhere, all units
    resident, one batch size), and stock (benchmarks.peer).

    For example: python -m benchmarks.speed --budgets 100 200 500 --arms blockwise backprop-single --tightest classic

    Args:
        model: model to train.
        budgets: memory budgets in MB; 0 for none.
        arms: what to compare; blockwise is what ratios refer to.
        tightest: arms whose tightest budget is looked for and added to the budgets; "none" for none.
        resolution: to how many MB a tightest budget is found.
        max_train: training images.
        max_val: validation (and test) images.
        epochs: epochs.
        seed: seed.
        repeats: times that everything is run, forwards and backwards in turn; tables give medians.
        options: what every benchmark takes.
    """
    results = ResultFile("speed", options)
    shared = options.settings(model=model, max_train=max_train, max_val=max_val, epochs=epochs, seed=seed)
    found = [tightest_budget(arm, shared, results, resolution) for arm in tightest if arm != "none"]
    wanted = sorted({*(budget for budget in budgets if budget), *(budget for budget in found if budget is not None)})
    cells = [(budget, arm) for budget in wanted for arm in arms]
    for repeat, (budget, arm) in alternate(cells, repeats):
        measure(arm, {**shared, "memory": f"{budget}MB"}, results, repeat)
    finish(results, render)


def measure(arm: str, settings: Settings, results: ResultFile, repeat: int) -> Cell:
    """Run one arm from start to end."""
    if arm == STOCK:
        command = ["benchmarks.peer", *to_flags(settings)]
        label = " ".join(["python", "-m", *command])
        return results.once(label, lambda: _peer(command, results.options), repeat, arm=arm, settings=settings)
    return results.train({**settings, **ARMS[arm]}, repeat, arm=arm)


def _peer(command: list[str], options: Options) -> Cell:
    cell = run(command, options)
    output = cell.pop("output")
    if "error" in output:
        return {**cell, "error": output["error"]}
    return {**cell, "record": output, "training_seconds": output.pop("training_seconds", None)}


def tightest_budget(arm: str, shared: Settings, results: ResultFile, resolution: int) -> int | None:
    """Smallest budget, in MB, that an arm's plan accepts and in which one step of it trains.

    Args:
        arm: name of the arm.
        shared: what all arms share.
        results: where the answer is kept.
        resolution: to how many MB.
    """
    settings = {**shared, **ARMS[arm]}
    label = f"tightest budget, to {resolution} MB: snugfit plan {' '.join(to_flags(settings))}"
    cell = results.once(label, lambda: _search(settings, results.options, resolution), arm=arm, settings=settings)
    return None if cell["tightest_mb"] is None else int(cell["tightest_mb"])


def _search(settings: Settings, options: Options, resolution: int) -> Cell:
    def plans(budget: int) -> bool:
        planned = run(
            ["snugfit", "plan", *to_flags({**settings, "memory": f"{budget}MB"}), "--json", "--quiet"], options
        )
        note(f"         plan at {budget} MB: exit {planned['exit_code']}")
        return bool(planned["exit_code"] == 0)

    def trains(budget: int) -> bool:
        short = {**settings, "memory": f"{budget}MB", "max_train": options.batch_size, "max_val": 16, "epochs": 1}
        return bool(train(short, options)["exit_code"] == 0)

    upper = _named_budget(settings, options)
    if upper is None:
        return {"tightest_mb": None}
    return {"tightest_mb": smallest_accepted(plans, trains, upper, resolution)}


def _named_budget(settings: Settings, options: Options) -> int | None:
    """What the error of a budget that nothing fits in names, in MB."""
    cell = run(["snugfit", "plan", *to_flags({**settings, "memory": "1MB"}), "--json", "--quiet"], options)
    named = smallest_named({"error": cell["output"].get("error", {})})
    return None if named is None else -(-named // MB)


def smallest_accepted(
    plans: Callable[[int], bool], trains: Callable[[int], bool], start: int, resolution: int, limit: int = 20
) -> int | None:
    """Bisect for the smallest budget that ``plans`` accepts, then go up until ``trains`` does too.

    Args:
        plans, trains: whether a budget in MB is accepted.
        start: a budget near the answer.
        resolution: to how many MB.
        limit: steps up that are tried; None is returned after them.
    """
    high, steps = start, 0
    while not plans(high):
        high, steps = high + resolution, steps + 1
        if steps == limit:
            return None
    low = high // 2
    while high - low > resolution:
        middle = (low + high) // 2
        low, high = (low, middle) if plans(middle) else (middle, high)
    return next((high + step * resolution for step in range(limit) if trains(high + step * resolution)), None)


if __name__ == "__main__":
    app()
