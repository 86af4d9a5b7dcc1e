"""Gradients of large weights that are applied in parts: the same update, and less memory."""

import copy

import pytest
import torch
from torch import nn

from snugfit.lean import LeanConv2d, by_position, convolution
from snugfit.lean.by_position import Geometry, weight_gradient, weight_gradient_parts
from snugfit.lean.optimizer_state import PIECE, RoundingRule
from snugfit.lean.update_rules import PART_MULTIPLE, FusedAdamW, FusedSGD, PartialRule, values_in_memory

RULES = {
    "sgd": lambda: FusedSGD(0.1, 0.9, 5e-4),
    "sgd without momentum": lambda: FusedSGD(0.1),
    "adamw": lambda: FusedAdamW(0.01, 0.05),
    "sgd in int8": lambda: RoundingRule(FusedSGD(0.1, 0.9), "int8", seed=3),
    "adamw in int8": lambda: RoundingRule(FusedAdamW(0.01), "int8", seed=3),
    "adamw in bfloat16": lambda: RoundingRule(FusedAdamW(0.01), "bfloat16", seed=3),
}


FILTERS = (64, 40, 3, 3)
"""Shape of a weight that rules which round update in two pieces."""


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(FILTERS, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype, memory_format=torch.channels_last)


def step_in_parts(rule: PartialRule, parameter: nn.Parameter, gradient: torch.Tensor, size: int) -> None:
    values = values_in_memory(gradient)
    with torch.no_grad():
        rule.begin(parameter)
        for first in range(0, len(values), size):
            rule.step_part(parameter, values[first : first + size], first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_a_gradient_in_parts_updates_as_the_whole_one(name, dtype):
    one, other = (nn.Parameter(drawn(0, dtype)) for _ in range(2))
    whole, parts = RULES[name](), RULES[name]()
    rounds = isinstance(parts, RoundingRule)
    if dtype == torch.bfloat16 and not rounds:
        pytest.skip("rules that do not round update no weights in bfloat16")
    for parameter in (one, other) if dtype == torch.bfloat16 else ():
        parameter.grad_dtype = torch.float32
    for step in range(3):
        one.grad = drawn(step + 1)
        whole.step(one)
        step_in_parts(parts, other, drawn(step + 1), PIECE if rounds else 2 * PART_MULTIPLE)
    assert torch.equal(one, other)
    assert whole.state.keys() == parts.state.keys()
    assert all(torch.equal(whole.state[key], parts.state[key]) for key in whole.state)


@pytest.mark.parametrize("channels", [3, 40])
def test_parts_are_those_of_the_gradient_and_begin_where_blocks_do(monkeypatch, channels):
    monkeypatch.setattr(by_position, "PART_VALUES", 1000)
    torch.manual_seed(0)
    inputs, gradient = torch.randn(5, channels, 4, 4), torch.randn(5, 64, 4, 4)
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)
    whole = values_in_memory(weight_gradient(gradient, inputs, (3, 3), geometry))
    parts = list(weight_gradient_parts(gradient, inputs, (3, 3), geometry))
    assert [first for first, _ in parts] == [*range(0, len(whole), len(parts[0][1]))]
    assert all(first % PART_MULTIPLE == 0 for first, _ in parts)
    assert len(parts) > 1 or channels == 3, "filters of 27 values begin at a block's beginning only every 256"
    torch.testing.assert_close(torch.cat([values for _, values in parts]), whole)


class Recorder:
    """Keeps the parts that a layer passes on, for one weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight, self.parts = weight, []

    def serves(self, weight: torch.Tensor) -> bool:
        return weight is self.weight

    def __call__(self, parts) -> None:
        self.parts = [(first, values.clone()) for first, values in parts]


@pytest.mark.parametrize("side", [4, 5])
def test_a_layer_passes_on_parts_where_it_computes_by_position(monkeypatch, side):
    monkeypatch.setattr(by_position, "PART_VALUES", 1000)
    monkeypatch.setattr(convolution, "PART_VALUES", 1000)
    torch.manual_seed(0)
    layer = LeanConv2d(40, 64, 3, padding=1).to(memory_format=torch.channels_last)
    twin, images = copy.deepcopy(layer), torch.randn(5, 40, side, side, requires_grad=True)
    twin(images).square().sum().backward()
    expected, images.grad = images.grad, None
    layer.update = Recorder(layer.weight)
    layer(images).square().sum().backward()
    torch.testing.assert_close(images.grad, expected)
    torch.testing.assert_close(layer.bias.grad, twin.bias.grad)
    if side == 5:  # 25 pixels
        assert not layer.update.parts
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
    else:
        assert layer.weight.grad is None
        found = torch.cat([values for _, values in layer.update.parts])
        torch.testing.assert_close(found, values_in_memory(twin.weight.grad))
        layer.update.parts = []
        with convolution.gradients_in_parts(False):
            layer(images).square().sum().backward()
        assert not layer.update.parts
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
    assert layer.takes_parts
    other = copy.copy(layer)
    other.weight = nn.Parameter(layer.weight.detach().clone())
    other(images).sum().backward()
    assert other.weight.grad is not None, "it belongs to another layer"
