"""Claim: on the same schedule, blockwise training reaches backprop's accuracy with a much smaller and faster model.

Trains with both strategies from the same seeds, then times the exit model against the full network in one process.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import snugfit
from benchmarks.common import DEFAULTS, Cell, Options, Settings, program, run_folder, to_flags
from benchmarks.store import ResultFile, accuracy, finish, markdown, middle, note, number, percent, succeeded
from snugfit._upstream import to_channels_last

BATCHES = (1, 32, 128)
STRATEGIES = ("blockwise", "backprop")

app = program("accuracy")


@app.default
def main(
    *,
    model: str = "vgg16",
    memory: str = "500MB",
    max_train: int | None = 5000,
    max_val: int | None = None,
    epochs: int = 10,
    seeds: tuple[int, ...] = (0,),
    exit_tolerance: float | None = None,
    rounds: int = 15,
    options: Options = DEFAULTS,
) -> None:
    """Compare accuracy, parameters and inference speed of the exit model with the full network's.

    For example: python -m benchmarks.accuracy --epochs 12 --seeds 0 1 2

    Args:
        model: model to train.
        memory: memory budget of both strategies.
        max_train: training images.
        max_val: validation (and test) images.
        epochs: epochs.
        seeds: seeds; one pair of runs for each.
        exit_tolerance: validation accuracy that may be given up for a smaller exit; one standard error by default.
        rounds: timed batches per model and batch size.
        options: what every benchmark takes.
    """
    results = ResultFile("accuracy", options)
    for seed in seeds:
        shared = options.settings(
            model=model, memory=memory, max_train=max_train, max_val=max_val, epochs=epochs, seed=seed
        )
        pair = {
            "blockwise": {**shared, "strategy": "blockwise", "module_units": "1", "exit_tolerance": exit_tolerance},
            "backprop": {**shared, "strategy": "backprop"},
        }
        for strategy, settings in pair.items():
            results.train(settings, keep=True, arm=strategy)
        _compare(pair, results, rounds)
    finish(results, render)


def _compare(pair: dict[str, Settings], results: ResultFile, rounds: int) -> None:
    """Time both models of a pair; their run folders are deleted then."""
    folders = {strategy: run_folder(settings, results.options) for strategy, settings in pair.items()}
    label = f"throughput of {' and '.join(' '.join(to_flags(settings)) for settings in pair.values())}"
    if all((folder / "record.json").exists() for folder in folders.values()):
        settings = pair["blockwise"]
        results.once(label, lambda: _throughputs(folders, rounds, results.options), arm="throughput", settings=settings)
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
    elif all(cell["command"] != label for cell in results.cells):
        note(f"the models of seed {pair['backprop']['seed']} are gone or unfinished, so not timed; use --again")


def _throughputs(folders: dict[str, Path], rounds: int, options: Options) -> Cell:
    if options.threads:
        torch.set_num_threads(options.threads)
    networks = {strategy: snugfit.load(folder) for strategy, folder in folders.items()}
    architecture = snugfit._api.Architecture.read(folders["backprop"])
    shape = architecture.input_shape
    return {"images_per_second": {str(size): throughput(networks, shape, size, rounds) for size in BATCHES}}


@torch.inference_mode()
def throughput(networks: dict[str, nn.Module], shape: tuple[int, ...], batch: int, rounds: int) -> dict[str, float]:
    """Images per second of each network: the median over batches that are timed in turn.

    Args:
        networks: networks by name, in evaluation mode.
        shape: (C, H, W) of an image.
        batch: images at once.
        rounds: timed batches of each.
    """
    images = torch.randn(batch, *shape).contiguous(memory_format=torch.channels_last)
    for network in networks.values():
        to_channels_last(network.eval())
        network(images)
        network(images)
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(rounds):
        for name, network in networks.items():
            seconds[name].append(_timed(network, images))
    return {name: batch / median(values) for name, values in seconds.items()}


def _timed(network: nn.Module, images: Tensor) -> float:
    started = time.perf_counter()
    network(images)
    return time.perf_counter() - started


def render(cells: list[Cell]) -> str:
    """One row per seed, the conclusions, and the exits of the first seed."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_group(cell["settings"]), []).append(cell)
    return "\n\n".join(_group_part(group) for group in groups.values())


def _group(settings: Settings) -> tuple[str, ...]:
    """What runs share that differ in seed and strategy alone."""
    return tuple(to_flags({k: v for k, v in settings.items() if k not in ("seed", "strategy", "exit_tolerance")}))


def _group_part(cells: list[Cell]) -> str:
    settings = cells[0]["settings"]
    runs = {(cell["settings"]["seed"], cell["arm"]): cell for cell in succeeded(cells)}
    speeds = {cell["settings"]["seed"]: cell["images_per_second"] for cell in cells if cell["arm"] == "throughput"}
    seeds = [seed for seed, arm in runs if arm == "blockwise" and (seed, "backprop") in runs]
    title = (
        f"**{settings['model']}**, {settings['data']}, {settings['max_train'] or 'all'} training images, "
        f"epochs: {settings['epochs']}, {settings['memory']}"
    )
    if not seeds:
        return f"{title}: no finished pair of runs."
    header = ("seed", "backprop accuracy", "exit accuracy", "difference (points)", "exit", "full / exit parameters",
              *(f"exit / full images per second, batch {size}" for size in BATCHES))  # fmt: skip
    rows = [_row(seed, runs[seed, "blockwise"], runs[seed, "backprop"], speeds.get(seed)) for seed in seeds]
    exits = markdown(("exit", "parameters", "validation accuracy"), _exit_rows(runs[seeds[0], "blockwise"]))
    frontier = f"Exits of seed {seeds[0]} (the paper's Figure 10):\n\n{exits}"
    return "\n\n".join([title, markdown(header, rows), _conclusions(seeds, runs, speeds), frontier])


def _row(seed: int, blockwise: Cell, backprop: Cell, speeds: dict[str, dict[str, float]] | None) -> list[str]:
    exit_taken, parameters = blockwise["record"]["exit"], blockwise["record"]["parameters"]
    ratios = [None if speeds is None else _gain(speeds[str(size)]) for size in BATCHES]
    return [
        str(seed),
        percent(accuracy(backprop)),
        percent(accuracy(blockwise)),
        number(difference(blockwise, backprop)),
        f"{exit_taken['unit']} ({exit_taken['index'] + 1} of {exit_taken['of']})",
        number(parameters["full"] / parameters["trained_model"], 1),
        *map(number, ratios),
    ]


def difference(blockwise: Cell, backprop: Cell) -> float:
    """Points of test accuracy by which the exit model is better."""
    return 100 * ((accuracy(blockwise) or 0.0) - (accuracy(backprop) or 0.0))


def _gain(speeds: dict[str, float]) -> float:
    return speeds["blockwise"] / speeds["backprop"]


def _exit_rows(cell: Cell) -> list[list[str]]:
    return [[e["unit"], f"{e['parameters']:,}", percent(e["val_accuracy"])] for e in cell["record"]["exits"]]


def _conclusions(seeds: list[int], runs: dict[tuple[int, str], Cell], speeds: dict[int, dict]) -> str:  # type: ignore[type-arg]
    pairs = [(runs[seed, "blockwise"], runs[seed, "backprop"]) for seed in seeds]
    parameters = [blockwise["record"]["parameters"] for blockwise, _ in pairs]
    gains = [_gain(each[str(BATCHES[-1])]) for each in speeds.values()]
    points = middle(difference(*pair) for pair in pairs)
    factor = middle(each["full"] / each["trained_model"] for each in parameters)
    lines = (
        f"difference in accuracy, median: {number(points)} points (target: -1 or better)",
        f"full / exit parameters, median: {number(factor, 1)} (target: at least 10.9)",
        f"exit / full throughput at batch {BATCHES[-1]}, median: {number(middle(gains))} (target: at least 1.61)",
    )
    return "\n".join(f"- {line}" for line in lines)


if __name__ == "__main__":
    app()
