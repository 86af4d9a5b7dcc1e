"""Claim: a deeper exit is at least as accurate as a shallower one, and the stop and the tolerance give up little.

Trains blockwise with one unit per module: as planned; in blocks of two units, which cache their outputs; and in those
blocks with the saturation stop. Afterwards every exit is evaluated again from the images, without the cache, on the
validation and the test split, with the run's BatchNorm statistics and with those of all training images.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import DEFAULTS, Cell, Options, Settings, program, run_folder, to_flags, train
from benchmarks.store import ResultFile, finish, markdown, number, percent
from snugfit import _data as datasets
from snugfit import _models as models
from snugfit._chain import Chain, UnitStore, tracking_norms
from snugfit._core.record import ExitRecord
from snugfit._training.statistics import recompute_statistics
from snugfit._upstream import to_channels_last
from snugfit.local.assignment import Layout, parts
from snugfit.strategies.blockwise.partition import choose_exit, standard_error
from snugfit.strategies.blockwise.worker import loss_without_head

ONE, CACHED, STOPPED = "as planned", "blocks of 2", "blocks of 2, saturation stop"
ARMS: dict[str, Settings] = {ONE: {}, CACHED: {"block_units": 2}, STOPPED: {"block_units": 2, "saturation_stop": True}}
TOLERANCES: dict[str, float | None] = {"0": 0.0, "one standard error (default)": None, "0.02": 0.02}
PASS = 250
"""Images at once where nothing trains."""

app = program("exits")


@app.default
def main(
    *,
    model: str = "resnet20",
    memory: str = "300MB",
    losses: tuple[str, ...] = ("aan", "lls-mxm"),
    arms: tuple[str, ...] = tuple(ARMS),
    max_train: int = 2000,
    max_val: int = 2000,
    epochs: int = 10,
    lr: float = 0.05,
    seeds: tuple[int, ...] = (0,),
    options: Options = DEFAULTS,
) -> None:
    """Measure the accuracy of every exit, and what the saturation stop and the exit tolerance give up.

    For example: python -m benchmarks.exits --batch-size 64 --threads 1 --seeds 0 1 2

    Args:
        model: model to train.
        memory: memory budget.
        losses: local losses.
        arms: as planned; blocks of 2; blocks of 2, saturation stop.
        max_train: training images.
        max_val: validation images, and test images.
        epochs: epochs.
        lr: peak learning rate.
        seeds: seeds.
        options: what every benchmark takes.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    results = ResultFile("exits", options)
    shared = options.settings(
        model=model, memory=memory, max_train=max_train, max_val=max_val, epochs=epochs, lr=lr,
        strategy="blockwise", module_units="1",
    )  # fmt: skip
    for seed in seeds:
        for loss in losses:
            for arm in arms:
                measure(arm, {**shared, "local_loss": loss, "seed": seed, **ARMS[arm]}, results)
    finish(results, render)


def measure(arm: str, settings: Settings, results: ResultFile) -> None:
    """Train one arm, and evaluate its exits again."""
    label = " ".join(["snugfit", "train", *to_flags(settings)])

    def work() -> Cell:
        cell, folder = train(settings, results.options, keep=True), run_folder(settings, results.options)
        if "record" in cell:
            cell["again"] = evaluate(folder, settings, results.options.data_dir)
        shutil.rmtree(folder, ignore_errors=True)
        return cell

    results.once(label, work, arm=arm, settings=settings)


class Exits(nn.Module):
    """All trained exits of a run folder."""

    def __init__(self, folder: Path, settings: Settings, splits: datasets.Splits) -> None:
        super().__init__()
        shape, classes = splits.image_shape, len(splits.class_names)
        network = models.build(settings["model"], classes, shape[-1], shape[0])
        chain = Chain.from_module(network, shape)
        layout = Layout.of(chain, settings["local_loss"], classes)
        weights, classifiers = UnitStore(folder / "weights"), UnitStore(folder / "exits")
        chain.head.module.load_state_dict(weights.load(len(chain.units)))
        self.bodies, self.tails, self.losses = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for index in range(len(layout)):
            chain.units[index].module.load_state_dict(weights.load(index))
            loss = layout.make_loss(index)
            if (own := loss_without_head(loss)) is not None:
                if not any((folder / "exits").glob(f"unit_{index:03d}*")):
                    break  # not trained, after a saturation stop
                own.to_empty(device="cpu").load_state_dict(classifiers.load(index))
            body, tail = parts(layout.modules[index].module, loss)
            for modules, module in ((self.bodies, body), (self.tails, tail), (self.losses, loss)):
                modules.append(module)
        to_channels_last(self)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Scores (B, classes) of every exit for images (B, C, H, W)."""
        scores = []
        for body, tail, loss in zip(self.bodies, self.tails, self.losses, strict=True):
            features = body(images)
            scores.append(loss.predict(features))  # type: ignore[operator]
            images = tail(features)
        return scores


@torch.no_grad()
def evaluate(folder: Path, settings: Settings, data_dir: str | None) -> dict[str, list[float]]:
    """Accuracy of every exit by split, from the images; ``test_all`` with statistics of all training images."""
    counts = {"max_train": settings["max_train"], "max_val": settings["max_val"]}
    splits = datasets.load(settings["data"], data_dir=data_dir, seed=settings["seed"], **counts)
    assert splits.test is not None
    transform = datasets.Transform(splits.mean, splits.std, splits.flip)
    val, test = (datasets.Batches(each, transform).in_order(PASS) for each in (splits.val, splits.test))
    exits = Exits(folder, settings, splits).eval()
    found = {"val": accuracies(exits, val), "test": accuracies(exits, test)}
    augmented = datasets.Batches(splits.train, transform, seed=settings["seed"], augment=True).epoch(0, PASS)
    norms = tracking_norms(exits.train())
    recompute_statistics(norms, exits.eval(), augmented, torch.device("cpu"))
    again = datasets.Batches(splits.test, transform).in_order(PASS)
    return {**found, "test_all": accuracies(exits, again)}


def accuracies(exits: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Accuracy in [0, 1] of every exit on images (B, C, H, W) and labels (B,)."""
    right, seen = torch.tensor(0), 0
    for images, labels in batches:
        right = right + torch.tensor([int((scores.argmax(1) == labels).sum()) for scores in exits(images)])
        seen += len(labels)
    return (right / seen).tolist()


def render(cells: list[Cell]) -> str:
    """A table of exits for every loss and way of training, then the stop and the tolerances."""
    done = sorted((cell for cell in cells if "again" in cell), key=_key)
    if not done:
        return "No finished runs."
    settings = done[0]["settings"]
    error = 100 * standard_error(0.4, settings["max_val"])
    title = (
        f"**{settings['model']}** on {settings['data']}, {settings['max_train']} training images, "
        f"{settings['epochs']} epochs, {settings['max_val']} validation and as many test images; a standard error is "
        f"about {error:.1f} points"
    )
    tables = [_exit_table(name, runs) for name, runs in _distinct(done).items()]
    return "\n\n".join([title, *tables, markdown(_CHOICE, _choice_rows(done))])


def _key(cell: Cell) -> tuple[str, int]:
    return cell["settings"]["local_loss"], list(ARMS).index(cell["arm"])


def _distinct(cells: list[Cell]) -> dict[str, list[Cell]]:
    """Runs by the name of their arm; an arm whose exits are as accurate as a former one's adds its name to that."""
    found: dict[str, list[Cell]] = {}
    for _, group in groupby(cells, _key):
        runs = list(group)
        name = f"{runs[0]['settings']['local_loss']}, {runs[0]['arm']}"
        same = next((key for key, each in found.items() if _accuracies(each) == _accuracies(runs)), None)
        if same is None:
            found[name] = runs
        else:
            found[f"{same} or {runs[0]['arm']}"] = found.pop(same)
    return found


def _accuracies(runs: list[Cell]) -> list[dict[str, list[float]]]:
    return [cell["again"] for cell in runs]


def _exit_table(name: str, runs: list[Cell]) -> str:
    """Means over seeds; runs that stopped earlier than others count where they have an exit."""
    longest = max(runs, key=lambda cell: len(cell["record"]["exits"]))["record"]["exits"]
    rows = []
    for index, each in enumerate(longest):
        there = [cell for cell in runs if index < len(cell["record"]["exits"])]
        run = _mean(cell["record"]["exits"][index]["val_accuracy"] for cell in there)
        again = (percent(_mean(cell["again"][name][index] for cell in there)) for name in ("test", "test_all"))
        rows.append([each["unit"], percent(run), *again])
    seeds = ", ".join(str(cell["settings"]["seed"]) for cell in runs)
    header = ("exit", "validation", "test", "test, statistics of all training images")
    return f"{name} (seeds {seeds}; means):\n\n{markdown(header, rows)}\n\n{_compared(runs)}"


def _compared(runs: list[Cell]) -> str:
    """How deeper exits compare with shallower ones, and validation from images with that of the run."""
    drops = [drop for cell in runs for drop in falls(cell["again"]["test"], cell["settings"]["max_val"])]
    pairs = [
        abs(each["val_accuracy"] - again)
        for cell in runs
        for each, again in zip(cell["record"]["exits"], cell["again"]["val"], strict=True)
    ]
    text = f"Test accuracies more than one standard error below a shallower exit's: {len(drops)} of {len(pairs)}"
    most = f", at most {number(100 * max(drops), 1)} points" if drops else ""
    return (
        f"{text}{most}. Validation from images differs from the run's by at most {number(100 * max(pairs), 2)} points."
    )


def falls(values: list[float], count: int) -> list[float]:
    """How far exits lie below the best shallower one, where this exceeds one standard error on ``count`` images."""
    bests = [max(values[:index]) for index in range(1, len(values))]
    pairs = list(zip(bests, values[1:], strict=True))
    return [best - value for best, value in pairs if best - value > standard_error(best, count)]


_CHOICE = ("local loss", "trained", "tolerance", "runs", "exits trained", "exit taken", "parameters", "test", "seconds")


def _choice_rows(cells: list[Cell]) -> list[list[str]]:
    rows = []
    for (loss, _), group in groupby(cells, _key):
        runs = list(group)
        for name, tolerance in TOLERANCES.items():
            chosen = [choose_exit(exits_of(cell), cell["settings"]["max_val"], tolerance) for cell in runs]
            taken = [exits_of(cell).index(each) for cell, each in zip(runs, chosen, strict=True)]
            rows.append([
                loss, runs[0]["arm"], name, str(len(runs)),
                number(_mean(len(cell["record"]["exits"]) for cell in runs), 1),
                number(_mean(index + 1 for index in taken), 1),
                f"{_mean(each.parameters for each in chosen):,.0f}",
                percent(_mean(cell["again"]["test"][index] for cell, index in zip(runs, taken, strict=True))),
                number(_mean(cell["record"]["measured"]["seconds"] for cell in runs), 0),
            ])  # fmt: skip
    return rows


def exits_of(cell: Cell) -> list[ExitRecord]:
    """The exits of a run."""
    names = ExitRecord.__dataclass_fields__
    return [ExitRecord(**{name: each[name] for name in names}) for each in cell["record"]["exits"]]


def _mean(values: Iterable[Any]) -> float:
    found = [float(value) for value in values]
    return sum(found) / len(found)


if __name__ == "__main__":
    app()
