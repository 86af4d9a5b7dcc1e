"""Claim: fine-tuning takes a stated fraction of the full time, and less memory, at nearly the same accuracy.

The claims of ElasticTrainer's evaluation, one sub-command each. ``model``, ``ratio`` and ``solver`` run in one process
on made-up images; ``similarity``, ``memory`` and ``finetune`` run ``snugfit train`` on photos.
"""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

import snugfit
from benchmarks.common import DEFAULTS, Cell, Options, Settings, program, run_folder, train
from benchmarks.elastic_steps import Bench, alternating, bench, drawn_importances, random_masks
from benchmarks.elastic_tables import render
from benchmarks.store import ResultFile, finish
from snugfit.selection.choice import Headroom, choose
from snugfit.selection.solver import solve

MODELS = ("resnet50", "mobilenet_v2", "vgg16_imagenet", "vit_b_16")
SCHEMES: dict[str, Settings] = {
    "full": {"scheme": "full", "lean": False},
    "elastic": {"scheme": "elastic"},
    "head": {"scheme": "head", "lean": False},
    "bn+bias": {"scheme": "bn+bias", "lean": False},
    "prunetrain": {"scheme": "prunetrain", "lean": False},
    "elastic by gradient": {"scheme": "elastic", "importance": "gradient"},
    "elastic by weight": {"scheme": "elastic", "importance": "weight"},
}

app = program("elastic")


def _each(
    claim: str, models: tuple[str, ...], options: Options, measure: Callable[[Settings], Cell], **more: Any
) -> None:
    snugfit.prepare_process(options.threads)
    results = ResultFile("elastic", options)
    for model in models:
        settings: Settings = {"claim": claim, **options.settings(model=model, **more)}
        settings.pop("data")
        label = " ".join(f"{key}={value}" for key, value in settings.items())
        results.once(label, lambda s=settings: measure(s), arm=claim, settings=settings)  # type: ignore[misc]
    finish(results, render)


@app.command
def model(
    *,
    models: tuple[str, ...] = MODELS,
    selections: int = 50,
    repeats: int = 3,
    seed: int = 0,
    options: Options = DEFAULTS,
) -> None:
    """Predicted against measured step time, for random selections.

    Args:
        models: networks, at 224x224 pixels.
        selections: how many.
        repeats: timed steps of each.
        seed: of the selections.
        options: what every benchmark takes; the paper's batch size is 4.
    """

    def measure(settings: Settings) -> Cell:
        made, pairs = bench(settings), []
        made.beside_forward(made.times.everything, 1)  # the first steps generate kernels
        for mask in random_masks(made.network, selections, seed):
            pairs.append({
                "tensors": int(mask.sum()),
                "predicted": made.times.step_seconds(mask),
                **made.beside_forward(mask, repeats),
            })  # fmt: skip
        head = made.beside_forward(made.network.head, 2 * repeats)
        least = {"predicted": made.times.least, **head}
        return {"profile_seconds": made.profile.seconds, "least": least, "selections": pairs}

    _each("model", models, options, measure, selections=selections, repeats=repeats)


@app.command
def ratio(
    *,
    models: tuple[str, ...] = ("resnet50", "mobilenet_v2"),
    ratios: tuple[float, ...] = (0.35, 0.4, 0.5, 0.7),
    repeats: int = 5,
    seed: int = 0,
    options: Options = DEFAULTS,
) -> None:
    """Step time of what is selected over that of stock full training, measured in turns.

    Args:
        models: networks, at 224x224 pixels.
        ratios: values of rho.
        repeats: timed steps of each kind.
        seed: of the importances, which are drawn log-normally.
        options: what every benchmark takes.
    """

    def measure(settings: Settings) -> Cell:
        made = bench(settings)
        value = np.random.default_rng(seed).lognormal(sigma=2.0, size=len(made.network.names))
        found = []
        for rho in ratios:
            if rho < made.times.smallest_ratio:
                found.append({"rho": rho, "smallest": made.times.smallest_ratio})
                continue
            mask = choose(made.times, made.network, value, Headroom(rho))
            seconds = _against_full(made, mask, repeats)
            found.append({"rho": rho, "predicted": made.times.ratio(mask), "tensors": int(mask.sum()), **seconds})
        return {"profile_seconds": made.profile.seconds, "ratios": found}

    _each("ratio", models, options, measure, repeats=repeats)


def _against_full(made: Bench, mask: np.ndarray, repeats: int) -> dict[str, float]:
    """Steps with a selection and stock steps of full training, in turns; each after one to settle its optimizer."""

    def step(chosen: np.ndarray, *, lean: bool) -> float:
        made.select(chosen, lean=lean)
        made.step()
        return made.step()

    return alternating(
        {"selected": lambda: step(mask, lean=True), "full": lambda: step(made.times.everything, lean=False)}, repeats
    )


@app.command
def solver(*, models: tuple[str, ...] = ("resnet50",), repeats: int = 5, options: Options = DEFAULTS) -> None:
    """Seconds of the dynamic programme, and of the solver with two budgets.

    Args:
        models: networks, at 224x224 pixels.
        repeats: importances that are drawn, for each memory budget.
        options: what every benchmark takes.
    """

    def measure(settings: Settings) -> Cell:
        made = bench(settings)
        network, draw = made.network, np.random.default_rng(0)
        one, two = [], []
        most = int(network.own_bytes.sum() + network.input_bytes.sum() + network.pass_bytes.sum())
        for _ in range(repeats):
            value = draw.lognormal(sigma=2.0, size=len(network.names))
            started = time.perf_counter()
            found = solve(value, network.t_dw, network.t_dy, made.times.backward_budget(0.5))
            one.append(time.perf_counter() - started)
            for share in (0.1, 0.3, 0.5):
                started = time.perf_counter()
                choose(made.times, network, value, Headroom(0.5, int(share * most)))
                two.append(time.perf_counter() - started)
        step = made.times.full * 0.5
        return {"one_budget": one, "two_budgets": two, "step_seconds": step, "solved": found.solved,
                "skipped": found.invalid + found.redundant, "tensors": len(network.names)}  # fmt: skip

    _each("solver", models, options, measure, repeats=repeats)


@app.command
def similarity(
    *,
    weights: Path,
    model: str = "mobilenet_v2",
    epochs: int = 8,
    lr: float = 0.001,
    image_size: int = 128,
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16),
    draws: int = 6,
    max_train: int | None = None,
    options: Options = DEFAULTS,
) -> None:
    """Cosine similarity of importances some epochs apart, and of two draws of some images (Figure 7).

    Args:
        weights: pre-trained weights.
        model: network.
        epochs: epochs of full training, at each of which importance is told.
        lr: peak learning rate.
        image_size: side of the images in pixels.
        sizes: numbers of images that importance is told from, at the first weights.
        draws: draws of each.
        max_train: training images.
        options: what every benchmark takes.
    """
    results = ResultFile("elastic", options)
    settings = options.settings(
        model=model, strategy="elastic", epochs=epochs, lr=lr, image_size=image_size, max_train=max_train,
        interval=1, time_ratio=1.0,
    )  # fmt: skip

    def measure() -> Cell:
        cell = train({**settings, "weights": weights}, options)
        scores = [list(interval["importance"].values()) for interval in cell.pop("record")["intervals"]]
        by_lag = {lag: _mean_similarity(list(zip(scores, scores[lag:], strict=False))) for lag in range(1, epochs)}
        found = drawn_importances(settings, weights, sizes, draws)
        by_batch = {size: _mean_similarity(list(combinations(rows, 2))) for size, rows in found.items()}
        return {**cell, "by_lag": by_lag, "by_batch": by_batch}

    label = "claim=similarity " + " ".join(f"{key}={value}" for key, value in settings.items())
    results.once(label, measure, arm="similarity", settings=settings)
    finish(results, render)


def _mean_similarity(pairs: list[tuple[list[float], list[float]]]) -> float:
    """Mean cosine similarity of pairs of importances."""
    arrays = [(np.array(a), np.array(b)) for a, b in pairs]
    return float(np.mean([a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in arrays]))


@app.command
def memory(
    *,
    model: str = "resnet50",
    max_train: int = 24,
    schemes: tuple[str, ...] = ("full", "head", "bn+bias", "elastic"),
    options: Options = DEFAULTS,
) -> None:
    """Measured peaks with lean and with stock operators, and of ``elastic`` in half of full training's memory.

    Args:
        model: network, at 224x224 pixels.
        max_train: training images.
        schemes: what to compare.
        options: what every benchmark takes.
    """
    results = ResultFile("elastic", options)
    shared = options.settings(
        model=model, strategy="elastic", epochs=1, max_train=max_train, max_val=8, image_size=224, lr=1e-4
    )
    for scheme in schemes:
        for lean in (True, False):
            settings = {**shared, "scheme": scheme, "lean": lean}
            _train(results, "memory", settings, options)
    if "full" in schemes:
        stock = {**shared, "scheme": "full", "lean": False}
        peak = next(c for c in results.cells if c.get("settings") == stock)["record"]["measured"]["peak_bytes"]
        _train(
            results,
            "memory",
            {**shared, "scheme": "elastic", "lean": True, "memory": f"{peak // 2_000_000}MB"},
            options,
        )
    finish(results, render)


@app.command
def finetune(
    *,
    model: str = "mobilenet_v2",
    weights: Path,
    schemes: tuple[str, ...] = tuple(SCHEMES),
    time_ratio: float = 0.5,
    epochs: int = 12,
    lr: float = 0.001,
    image_size: int = 128,
    max_train: int | None = None,
    seed: int = 0,
    options: Options = DEFAULTS,
) -> None:
    """Accuracy and time of every scheme on real photos, from pre-trained weights.

    Args:
        model: network.
        weights: its pre-trained weights.
        schemes: what to compare; "full" is what the others are compared with.
        time_ratio: rho of ``elastic``.
        epochs: passes over the images; the paper takes 12.
        lr: peak learning rate of all schemes, chosen on the validation split of full training.
        image_size: side of the images in pixels.
        max_train: training images.
        seed: seed.
        options: what every benchmark takes.
    """
    results = ResultFile("elastic", options)
    for scheme in schemes:
        ratio = {"time_ratio": time_ratio} if scheme.startswith("elastic") else {}
        settings = options.settings(
            model=model, strategy="elastic", epochs=epochs, lr=lr, image_size=image_size, max_train=max_train,
            seed=seed, **SCHEMES[scheme], **ratio,
        )  # fmt: skip
        _train(results, "finetune", settings, options, weights)
    finish(results, render)


def _train(results: ResultFile, claim: str, settings: Settings, options: Options, weights: Path | None = None) -> None:
    """Run ``snugfit train`` once, and keep the course of its epochs."""

    def measure() -> Cell:
        flags = {**settings, **({"weights": weights} if weights else {})}
        cell = train(flags, options, keep=True)
        folder = run_folder(flags, options)
        if (folder / "metrics.csv").is_file():
            cell["epochs"] = course(folder / "metrics.csv")
        shutil.rmtree(folder, ignore_errors=True)
        if "record" in cell:
            for interval in cell["record"]["intervals"]:
                interval.pop("importance")
            cell["record"].pop("lines", None)
        return cell

    label = f"claim={claim} " + " ".join(f"{key}={value}" for key, value in settings.items())
    results.once(label, measure, arm=claim, settings=settings)


def course(metrics: Path) -> list[dict[str, float]]:
    """Seconds since the start and validation accuracy at the end of every epoch."""
    rows = [row for row in csv.DictReader(metrics.read_text().splitlines()) if row.get("val_accuracy")]
    return [{"seconds": float(row["seconds"]), "val_accuracy": float(row["val_accuracy"])} for row in rows]


if __name__ == "__main__":
    app()
