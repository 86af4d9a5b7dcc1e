"""What runs are compared with, and how: the loop that anyone would write, and weights that must be the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import count as numbers
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import snugfit
from snugfit._api import RunnablePlan
from snugfit._core.option_groups import DataOptions, ModelOptions, TrainingOptions
from snugfit._core.request import Request, StrategyOptions
from snugfit._core.serial import from_data, to_data
from snugfit._engine.builder import assemble
from snugfit._training.events import Event, StepDone
from snugfit._training.statistics import images_for
from snugfit._training.stopping import StopFlag
from snugfit.errors import InterruptedRunError
from snugfit.strategies.blockwise.strategy import Blockwise

SHORT: dict[str, Any] = {"epochs": 2, "max_train": 60, "max_val": 20, "batch_size": 20, "threads": 1, "image_size": 8}
"""Options of a run on digits."""


def network(seed: int = 0) -> nn.Module:
    """One convolution and a head for such a run."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


def weights(folder: Path, **options: Any) -> dict[str, Tensor]:
    """The weights after such a run."""
    snugfit.plan(network(), "digits", **{**SHORT, **options}).run((), out=folder)
    return load_file(folder / "model.safetensors")


def stock_sgd(network: nn.Module) -> torch.optim.Optimizer:
    """Torch's optimizer with the defaults of a run."""
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def train_plainly(
    network: nn.Module,
    options: dict[str, Any],
    epochs: int = 2,
    make: Callable[[nn.Module], torch.optim.Optimizer] = stock_sgd,
) -> dict[str, Tensor]:
    """Train a network, in the mode that it is in, on a run's images at a constant rate; its weights.

    Statistics of norms that are in training mode are those of the last epoch's first images in the trained weights.
    """
    size, batch = options["image_size"], options["batch_size"]
    request = Request(
        ModelOptions("python", image_size=size),
        DataOptions("digits", max_train=options["max_train"], max_val=options["max_val"]),
        training=TrainingOptions(epochs=epochs, batch_size=batch, seed=options["seed"], schedule="constant"),
        strategy=StrategyOptions("backprop"),
    )
    source = assemble(request, module=copy.deepcopy(network)).training_data().train
    optimizer = make(network)
    for epoch in range(epochs):
        for images, labels in source.epoch(epoch, batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
    norms: dict[_BatchNorm, list[Tensor]] = {
        layer: [] for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.training
    }
    batches = [images for images, _ in source.epoch(epochs - 1, batch)][: images_for(len(source)) // batch]
    take_statistics(network, norms, batches if norms else [])
    return dict(network.state_dict())


@torch.no_grad()
def take_statistics(network: nn.Module, norms: dict[_BatchNorm, list[Tensor]], batches: list[Tensor]) -> None:
    """Statistics of all values that norms read in a list, put together in float64."""
    for norm, read in norms.items():
        norm.momentum = 0.0
        norm.register_forward_pre_hook(lambda _, given, read=read: read.append(given[0].transpose(0, 1).flatten(1)))
    for layer in network.modules():
        layer.training = layer in norms
    counts = [norm.num_batches_tracked.clone() for norm in norms]
    for images in batches:
        network(images)
    for (norm, read), count in zip(norms.items(), counts, strict=True):
        values = torch.cat(read, 1).double()
        norm.running_mean.copy_(values.mean(1))
        norm.running_var.copy_(values.var(1))
        norm.num_batches_tracked.copy_(count)


def in_blocks(plan: RunnablePlan, *blocks: tuple[int, int, int]) -> RunnablePlan:
    """The plan with given blocks (first unit, last unit, batch): without a tight budget there would be only one."""
    (candidate,) = plan.plan.candidates
    strategy = replace(from_data(Blockwise, candidate.settings), blocks=blocks)
    cost = strategy.estimate(plan.plan.workload, plan.profile, plan.plan.hardware)
    candidate = replace(candidate, settings=to_data(strategy), predicted=cost)
    return replace(plan, plan=replace(plan.plan, candidates=(candidate,)))


def interrupt(
    plan: RunnablePlan | None, folder: Path, kind: type[Event] = StepDone, count: int = 2, **options: Any
) -> None:
    """Run a plan, or resume its run with options, and interrupt it at its event number ``count`` of a kind."""
    stop, number = StopFlag(), numbers(1)

    def watch(event: Event) -> None:
        if isinstance(event, kind) and next(number) == count:
            stop.request()

    with pytest.raises(InterruptedRunError):
        if plan is not None:
            plan.run((watch,), out=folder, stop=stop)
        else:
            snugfit.resume(folder, (watch,), stop=stop, **options)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Tensors of the same names and, within the tolerance, absolute and relative, of the same values."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(
            second[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
