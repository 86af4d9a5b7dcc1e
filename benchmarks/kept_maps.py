"""What a convolution keeps for its weight gradient as a low-rank projection, against 8 and 4 bits per value.

Activation subspace iteration (Nguyen et al., "Beyond Low-rank Decomposition", ICML 2025), over channels alone: a basis
P (C, r) takes one subspace iteration in every step, from that of the step before, and P and P^T X are kept of an input
X. In the bytes of 8 or 4 bits per value, r is a quarter or an eighth of the channels in float32. The input's gradient
is exact. The weight's is that of P P^T X, which is biased. Inputs of BatchNorm have 8 or 4 bits in both.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import DEFAULTS, Cell, Options, Settings, program
from benchmarks.store import ResultFile, finish, markdown, mb, number, percent
from snugfit import _data as datasets
from snugfit import _models as models
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._training.network import NetworkTrainer
from snugfit._training.optimizers import lr_factor
from snugfit._training.task import count_correct
from snugfit._upstream import to_channels_last
from snugfit.lean.convolution import LeanConv2d
from snugfit.memory import tensor_peak_bytes

ARMS = {"exact": 0, "int8": 0, "int4": 0, "int8, C / 4": 4, "int4, C / 8": 8}
"""Types of what is kept, and by which factor fewer channels convolutions keep."""

app = program("kept_maps")


@app.default
def main(
    *, image_size: int = 16, images: int = 2000, epochs: int = 4, seeds: int = 3, options: Options = DEFAULTS
) -> None:
    """Train ResNet-20 with what convolutions keep in full, in 8 or 4 bits, or projected to fewer channels.

    For example: python -m benchmarks.kept_maps --batch-size 32 --threads 1

    Args:
        image_size: side of an image in pixels.
        images: training images, and at most as many for validation and test.
        epochs: epochs.
        seeds: number of seeds.
        options: what every benchmark takes.
    """
    torch.set_num_threads(options.threads or torch.get_num_threads())
    results = ResultFile("kept_maps", options)
    shared = options.settings(model="resnet20", image_size=image_size, max_train=images, epochs=epochs, lr=0.05)
    for settings in ({**shared, "seed": seed, "arm": arm} for seed in range(seeds) for arm in ARMS):
        label = " ".join(f"{key}={value}" for key, value in settings.items())
        results.once(label, partial(run_arm, settings, options.data_dir), settings=settings)
    finish(results, render)


class ProjectedConvolution(torch.autograd.Function):
    """Input (B, C, H, W) to (B, K, H', W'), of which P^T X (B, r, H, W) is kept for the gradient of the weight.

    With E = X - P P^T X, the error of a weight's gradient is E's. At each tap of the kernel, its norm is at most the
    norm of E times the norm of the output's gradient (Cauchy).
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, basis: Tensor, geometry: tuple[Any, ...]) -> Tensor:
        """Improve ``basis`` (C, r) in place, with weight (K, C, kh, kw) and stride, padding and dilation."""
        rows = inputs.permute(0, 2, 3, 1).reshape(-1, len(basis))
        basis.copy_(torch.linalg.qr(rows.t() @ (rows @ basis)).Q)
        pixels = (len(inputs), *inputs.shape[2:], basis.shape[1])
        ctx.save_for_backward((rows @ basis).view(pixels).permute(0, 3, 1, 2), basis.clone(), weight)
        ctx.geometry, ctx.size = geometry, inputs.shape
        return F.conv2d(inputs, weight, None, *geometry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of input and weight from that of the output (B, K, H', W')."""
        kept, basis, weight = ctx.saved_tensors
        to_inputs = torch.nn.grad.conv2d_input(ctx.size, weight, gradient, *ctx.geometry)
        size = (len(weight), basis.shape[1], *weight.shape[2:])
        to_weight = torch.nn.grad.conv2d_weight(kept, size, gradient, *ctx.geometry)
        return to_inputs, torch.einsum("krij,cr->kcij", to_weight, basis), None, None


class ProjectedConv2d(LeanConv2d):
    """A convolution that keeps a share of its input's channels, without bias and groups."""

    basis: Tensor

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        geometry = (self.stride, self.padding, self.dilation)
        return ProjectedConvolution.apply(input, weight, self.basis, geometry)  # type: ignore[no-any-return]


def project(module: nn.Module, factor: int) -> None:
    """Let every convolution without bias and groups keep ``factor`` times fewer channels, if it is not 0."""
    for layer in [each for each in module.modules() if factor and isinstance(each, LeanConv2d)]:
        if (rank := layer.in_channels // factor) and layer.groups == 1 and layer.bias is None:
            layer.__class__ = ProjectedConv2d
            layer.basis = torch.linalg.qr(torch.randn(layer.in_channels, rank)).Q


def run_arm(settings: Settings, data_dir: str | None) -> Cell:
    """Train and test an arm; peak tensor bytes are those of the second step."""
    seed, count, epochs, batch = (settings[key] for key in ("seed", "max_train", "epochs", "batch_size"))
    options = {"image_size": settings["image_size"], "max_train": count, "max_val": count, "seed": seed}
    splits = datasets.load(settings["data"], data_dir=data_dir, **options)
    assert splits.test is not None
    shape, kept = splits.image_shape, settings["arm"].partition(",")[0]
    transform = datasets.Transform(splits.mean, splits.std, splits.flip)
    train = datasets.Batches(splits.train, transform, seed=seed, augment=True)
    sgd = OptimizerSettings("sgd", lr=settings["lr"], schedule="cosine")
    workload = Workload("resnet20", settings["data"], shape, 10, count, 1, 1, optimizer=sgd, activations=kept)
    torch.manual_seed(seed)
    module = models.build(workload.model, workload.classes, shape[-1], shape[0])
    to_channels_last(module)
    trainer = NetworkTrainer(module, module, workload)
    project(module, ARMS[settings["arm"]])
    peak, started, step = 0, time.process_time(), 0
    for epoch in range(epochs):
        for images, labels in train.epoch(epoch, batch):
            trainer.set_lr_factor(lr_factor(sgd, step, count // batch, epochs))
            run = partial(trainer.step, images, labels)
            peak, step = tensor_peak_bytes(run, [module]) if step == 1 else (run(), peak)[1], step + 1
    seconds, forward, right = (time.process_time() - started) / epochs, trainer.evaluating(), 0
    with torch.no_grad():
        for images, labels in datasets.Batches(splits.test, transform, seed=seed).in_order(250):
            right += int(count_correct(forward(images), labels))
    return {"test": right / len(splits.test), "peak_bytes": peak, "cpu_seconds_per_epoch": round(seconds, 2)}


def render(cells: list[Cell]) -> str:
    """A row per arm: means over its seeds."""
    rows, cells = [], [cell for cell in cells if "arm" in cell["settings"]]
    header = ("kept", "test accuracy", "of each seed", "peak tensors (MB)", "CPU s/epoch")
    if not cells:
        return markdown(header, [])
    for arm in ARMS:
        own = [cell for cell in cells if cell["settings"]["arm"] == arm]
        each = " ".join(percent(cell["test"]) for cell in own)
        means = [fmean(cell[key] for cell in own) for key in ("test", "peak_bytes", "cpu_seconds_per_epoch")]
        rows.append([arm, percent(means[0]), each, mb(means[1]), number(means[2], 1)])
    shown = "**{model}** on {data} at {image_size} pixels, {max_train} images, {epochs} epochs, batches of {batch_size}"
    return f"{shown.format(**cells[0]['settings'])}\n\n{markdown(header, rows)}"


if __name__ == "__main__":
    app()
