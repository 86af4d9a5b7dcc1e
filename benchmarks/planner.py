"""Claim: a plan is right: what it says fits does, in the memory and time that it says, and nothing else does.

``matrix`` plans every model in every budget by every strategy, runs what is said to fit for a few steps under the
enforced limit, and tries what is said not to fit at its smallest setting under that limit. ``speed`` times planning
itself. Several lanes may fill one result file at the same time, each on a core of its own:
``taskset -c 0 python -m benchmarks.planner matrix --threads 1 --lane 0/2``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.common import DEFAULTS, INFEASIBLE, ROOT, Cell, Options, Settings, alternate, program, run, to_flags
from benchmarks.common import train as snugfit_train
from benchmarks.planner_tables import is_unserved, render, slim_record
from benchmarks.store import ResultFile, finish
from snugfit._core.option_groups import MachineOptions

SMALL: Settings = {"data": "cifar10", "max_train": 128, "max_val": 16, "batch_size": 32, "epochs": 1}
SUBJECTS: dict[str, Settings] = {
    "vgg16": SMALL,
    "vgg19": SMALL,
    "resnet18": {**SMALL, "max_train": 96},
    "mobilenet_v2": {**SMALL, "max_train": 192},
    "resnet50": {**SMALL, "data": "folder:flower_photos", "image_size": 224, "max_train": 32, "max_val": 4},
}
"""Images and settings of each model: few images, since a step tells what an epoch takes."""
BUDGETS = ("100MB", "200MB", "300MB", "500MB", "1GB")
STRATEGIES = ("backprop", "checkpoint", "blockwise", "elastic", "feedback", "sidenet", "tiled")
"""The slowest to plan come last."""
UNTRIED = frozenset({"sidenet"})
"""Strategies with too many ways to look for the least of them."""

app = program("planner")


@app.command
def matrix(
    *,
    models: tuple[str, ...] = tuple(SUBJECTS),
    budgets: tuple[str, ...] = BUDGETS,
    strategies: tuple[str, ...] = STRATEGIES,
    lane: str = "0/1",
    profile_cache: Path | None = None,
    options: Options = DEFAULTS,
) -> None:
    """Plan, run and check every cell; data, batch size and epochs are those of ``SUBJECTS``.

    Args:
        models: models of ``SUBJECTS``.
        budgets: memory budgets.
        strategies: strategies.
        lane: which part of the work to do, like 0/2 for the first of two parts.
        profile_cache: folder of measurements that plan and run share; one below the work folder by default.
        options: what every benchmark takes; the timeout is that of a single run.
    """
    results, cache = ResultFile("planner", options), profile_cache or work_folder(options) / "profiles"
    for model, strategy in share(tuple((model, strategy) for strategy in strategies for model in models), lane):
        for budget in sorted(budgets, key=_rank, reverse=True):  # what is measured in the largest serves the others
            settings = options.settings(**SUBJECTS[model], model=model, strategy=strategy, memory=budget)
            measure(settings, results, cache_flags(cache))
    finish(results, render)


def _rank(budget: str) -> int:
    return BUDGETS.index(budget) if budget in BUDGETS else len(BUDGETS)


def share(items: tuple[tuple[str, str], ...], lane: str) -> tuple[tuple[str, str], ...]:
    """The items of one lane: every n-th, from the lane's number on.

    Args:
        items: all items.
        lane: number and count, like ``0/2``.
    """
    number, _, count = lane.partition("/")
    return items[int(number) :: int(count)]


def work_folder(options: Options) -> Path:
    """Where what is needed for a while goes."""
    return options.work or Path(tempfile.gettempdir()) / "snugfit-benchmarks"


def knows_cache() -> bool:
    """Whether this version of snugfit keeps measurements between runs."""
    return hasattr(MachineOptions(), "profile_cache")


def cache_flags(folder: Path) -> list[str]:
    """Flags for measurements to be kept in a folder; none where this version keeps none."""
    return ["--profile-cache", str(folder)] if knows_cache() else []


def measure(settings: Settings, results: ResultFile, extra: list[str]) -> None:
    """Plan a cell; then run it, or where it does not fit, see that it does not."""
    flags, options = to_flags(settings), results.options
    planned = results.once(
        " ".join(["snugfit", "plan", *flags]), lambda: _plan(settings, options, extra), arm="plan", settings=settings
    )
    if planned["exit_code"] == 0:
        label = " ".join(["snugfit", "train", *flags])
        results.once(label, lambda: _train(settings, options, extra), arm="train", settings=settings)
    elif planned["exit_code"] == INFEASIBLE and settings["strategy"] not in UNTRIED and not is_unserved(planned):
        module = ["benchmarks.refused", *flags]
        results.once(
            " ".join(["python", "-m", *module]), lambda: _try(module, options), arm="refused", settings=settings
        )


def _plan(settings: Settings, options: Options, extra: list[str]) -> Cell:
    cell = run(["snugfit", "plan", *to_flags(settings), "--json", "--quiet"], options, extra)
    output = cell.pop("output")
    if "error" in output:
        cell["error"] = output["error"]
    if output.get("candidates"):
        best = output["candidates"][0]
        cell["candidate"] = {key: best[key] for key in ("feasible", "reasons", "smallest_bytes", "settings")}
        cell["candidate"]["predicted"] = _without_phases(best["predicted"])
    return cell


def _without_phases(cost: Cell | None) -> Cell | None:
    return cost and {key: value for key, value in cost.items() if key != "phases"}


def _train(settings: Settings, options: Options, extra: list[str]) -> Cell:
    cell = snugfit_train(settings, options, extra=extra)
    if "record" in cell:
        cell["record"] = slim_record(cell["record"])
    return cell


def _try(module: list[str], options: Options) -> Cell:
    cell = run(module, options)
    return {**cell, "outcome": cell.pop("output")}


@app.command
def speed(*, model: str = "vgg19", memory: str = "300MB", repeats: int = 3, options: Options = DEFAULTS) -> None:
    """Time planning with nothing measured yet, and again with what was then measured; start-up apart.

    Args:
        model: network.
        memory: memory budget.
        repeats: repetitions.
        options: what every benchmark takes.
    """
    results = ResultFile("planner", options)
    settings = options.settings(model=model, memory=memory)
    for repeat, which in alternate(("start", "cold"), repeats):
        if which == "start":
            _timed(results, "start", settings, repeat, lambda: _start_up(options))
            continue
        folder = work_folder(options) / "empty"
        shutil.rmtree(folder, ignore_errors=True)
        for state in ("cold", "cached") if knows_cache() else ("cold",):
            _timed(results, state, settings, repeat, partial(_timed_plan, settings, options, cache_flags(folder)))
        shutil.rmtree(folder, ignore_errors=True)
    finish(results, render)


def _timed(results: ResultFile, state: str, settings: Settings, repeat: int, work: Callable[[], Cell]) -> None:
    command = " ".join(["snugfit", "plan", *to_flags(settings), f"({state})"])
    results.once(command, work, repeat, arm="speed", state=state, settings=settings)


def _timed_plan(settings: Settings, options: Options, extra: list[str]) -> Cell:
    cell = run(["snugfit", "plan", *to_flags(settings), "--json", "--quiet"], options, extra)
    del cell["output"]
    return cell


def _start_up(options: Options) -> Cell:
    """Seconds until a plan could begin: both processes start, and the second one imports torch and takes a baseline."""
    prepare = f"import snugfit; snugfit.prepare_process({options.threads})"
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "snugfit", "--version"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-c", prepare], check=True, cwd=ROOT)
    return {"exit_code": 0, "seconds": round(time.perf_counter() - started, 3)}


if __name__ == "__main__":
    app()
