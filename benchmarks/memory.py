"""Claim: LLS trains in at most half (VGG8) and a quarter (MobileNetV1) of backprop's memory, the LLS paper's ratios.

All layers are in memory and learn in turn on each batch, as in the paper's Table 3: nothing is saved by keeping blocks
on disk. One process measures all methods with the same meter, on made-up images, at the batch size asked for.
"""

from __future__ import annotations

import gc

import torch

import snugfit
from benchmarks.common import DEFAULTS, Cell, Options, Settings, program
from benchmarks.store import ResultFile, finish, markdown, mb, number
from snugfit import _models as models
from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._engine.process import baseline, choose_device
from snugfit._training.network import NetworkTrainer
from snugfit._training.strategy import Trainable
from snugfit._upstream import to_channels_last
from snugfit.local.assignment import Layout
from snugfit.memory import make_meter, release_memory
from snugfit.strategies.blockwise.worker import BlockTrainer, LocalUnit, initialise_loss, loss_without_head
from snugfit.strategies.memory_estimates import random_batch

BACKPROP = "backprop"
METHODS = (BACKPROP, "linear", "lls", "lls-m", "lls-mxm")
IMAGES = {"vgg8": ((3, 32, 32), 10), "mobilenet_v1": ((3, 128, 128), 2)}
PAPER = {
    "vgg8": {BACKPROP: 1082, "linear": 576, "lls": 574, "lls-m": 574, "lls-mxm": 574},
    "mobilenet_v1": {BACKPROP: 3036, "linear": 730, "lls": 729, "lls-m": 729, "lls-mxm": 729},
}
TARGET = {"vgg8": 0.5, "mobilenet_v1": 0.25}
STEPS = 3

app = program("memory")


@app.default
def main(
    *,
    networks: tuple[str, ...] = tuple(IMAGES),
    methods: tuple[str, ...] = METHODS,
    optimizer: str = "schedulefree",
    options: Options = DEFAULTS,
) -> None:
    """Measure the peak of a few training steps by each method.

    For example: python -m benchmarks.memory --networks vgg8 --batch-size 64

    Args:
        networks: vgg8, mobilenet_v1.
        methods: backprop, and local losses.
        optimizer: sgd, adamw or schedulefree, which the paper used.
        options: what every benchmark takes; its ``data`` is not used.
    """
    snugfit.prepare_process(options.threads)
    results = ResultFile("memory", options)
    for network in networks:
        for method in methods:
            settings: Settings = {
                "model": network, "method": method, "batch_size": options.batch_size, "optimizer": optimizer,
            }  # fmt: skip
            label = " ".join(f"{key}={value}" for key, value in settings.items())
            results.once(label, lambda s=settings: _measure(s, options), arm=method, settings=settings)  # type: ignore[misc]
    finish(results, render)


def _measure(settings: Settings, options: Options) -> Cell:
    device = choose_device(options.device)
    shape, classes = IMAGES[settings["model"]]
    workload = Workload(
        settings["model"], "made-up", shape, classes, settings["batch_size"], 1, 1,
        optimizer=OptimizerSettings(settings["optimizer"], lr=0.005, schedule="constant"),
    )  # fmt: skip
    meter = make_meter(baseline(), device)
    release_memory()
    meter.restart()
    resting = meter.current_bytes
    trainer = make_trainer(settings["method"], workload, device)
    for _ in range(STEPS):
        inputs, labels = random_batch(shape, classes, settings["batch_size"], str(device))
        trainer.step(inputs, labels, 1.0, True)
        del inputs, labels
    peak = meter.mark()
    del trainer
    gc.collect()
    return {"peak_bytes": peak, "resting_bytes": resting, "metric": meter.metric}


def make_trainer(method: str, workload: Workload, device: torch.device) -> Trainable:
    """The whole network, by its own loss or with a local loss on every unit."""
    torch.manual_seed(0)
    module = models.build(workload.model, workload.classes, workload.input_shape[-1], workload.input_shape[0])
    to_channels_last(module, device)
    if method == BACKPROP:
        return NetworkTrainer(module, module, workload)
    layout = Layout.of(Chain.from_module(module, workload.input_shape), method, workload.classes)
    return BlockTrainer([_unit(layout, index, workload, device) for index in range(len(layout))])


def _unit(layout: Layout, index: int, workload: Workload, device: torch.device) -> LocalUnit:
    loss = layout.make_loss(index)
    if (own := loss_without_head(loss)) is not None:
        initialise_loss(own, index)
    loss.to(device)
    return LocalUnit(layout.chain.units[index].module, loss, workload)


def render(cells: list[Cell]) -> str:
    """One row per network and method, with the ratio to backprop."""
    measured = [cell for cell in cells if "peak_bytes" in cell]
    peaks = {(cell["settings"]["model"], cell["arm"]): cell["peak_bytes"] for cell in measured}
    rows, verdicts = [], []
    for (model, method), peak in peaks.items():
        reference, paper = peaks.get((model, BACKPROP)), PAPER[model]
        ratio = None if reference is None else peak / reference
        rows.append(
            (model, method, mb(peak), number(ratio), paper[method], number(paper[method] / paper[BACKPROP]))
        )  # fmt: skip
        if method.startswith("lls") and ratio is not None:
            verdicts.append(f"- {model}, {method}: {number(ratio)} of backprop's peak (target: {TARGET[model]})")
    header = ("model", "method", "peak (MB)", "of backprop's", "paper (MB)", "paper, of backprop's")
    return "\n\n".join([markdown(header, rows), "\n".join(verdicts)])


if __name__ == "__main__":
    app()
