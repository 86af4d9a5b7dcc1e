"""Buffers that a forward pass changes: no traced graph repeats what Python did to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit.errors import ModelError

SHAPE = (3, 8, 8)


class Counting(nn.Module):
    """A layer that counts its calls in a buffer, and adds the count to what it is given."""

    def __init__(self, change: Callable[[Any], object], *, read_mode: bool = False) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.change, self.read_mode = change, read_mode

    def forward(self, x: Tensor) -> Tensor:
        if not self.read_mode or self.training:
            self.change(self)
        return x + self.calls


def add_in_place(layer: Any) -> None:
    layer.calls += 1


def add_by_method(layer: Any) -> None:
    layer.calls.add_(1)


def assign(layer: Any) -> None:
    layer.calls = layer.calls + 1


def nothing(layer: Any) -> None:
    pass


def network(change: Callable[[Any], object], *, read_mode: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), Counting(change, read_mode=read_mode), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(),
        nn.Linear(64, 2),
    )  # fmt: skip


@pytest.mark.parametrize("change", [add_in_place, add_by_method, assign])
def test_a_network_whose_layer_changes_a_buffer_is_not_divided(change: Callable[[Any], object]) -> None:
    model = network(change)
    with pytest.raises(ModelError, match=r"Sequential changes the buffer '1.calls' in its forward pass"):
        Chain.from_module(model, SHAPE)
    chain = Chain.from_any_module(model, SHAPE)
    assert "1.calls" in chain.undivided
    assert model[1].calls == 0, "the caller's"
    twin, images = copy.deepcopy(model), torch.randn(2, *SHAPE)
    for _ in range(2):
        assert chain.forward(images).equal(twin(images))
    assert model[1].calls == 2


@pytest.mark.parametrize(("change", "read_mode"), [(nothing, False), (add_in_place, True)])
def test_a_network_whose_graph_keeps_the_changes_is_divided(change: Callable[[Any], object], read_mode: bool) -> None:
    model = network(change, read_mode=read_mode)
    chain = Chain.from_module(model, SHAPE)
    twin, images = copy.deepcopy(model), torch.randn(2, *SHAPE)
    for _ in range(2):
        assert chain.forward(images).equal(twin(images))
    assert model[1].calls == twin[1].calls
