"""What runs are compared with, and how: the loop that anyone would write, and weights that must be the same."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.api.assembling import assemble
from snugfit.core.request import DataOptions, ModelOptions, Request, StrategyOptions, TrainingOptions


def train_plainly(network: nn.Module, options: dict[str, Any], epochs: int = 2) -> dict[str, Tensor]:
    """Train a network, in the mode that it is in, on a run's images by SGD at a constant rate; its weights."""
    size, batch = options["image_size"], options["batch_size"]
    request = Request(
        ModelOptions("python", image_size=size),
        DataOptions("digits", max_train=options["max_train"], max_val=options["max_val"]),
        training=TrainingOptions(epochs=epochs, batch_size=batch, seed=options["seed"], schedule="constant"),
        strategy=StrategyOptions("backprop"),
    )
    source = assemble(request, module=copy.deepcopy(network)).training_data().train
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for epoch in range(epochs):
        for images, labels in source.epoch(epoch, batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
    return dict(network.state_dict())


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Tensors of the same names and, within the tolerance, absolute and relative, of the same values."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(
            second[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
