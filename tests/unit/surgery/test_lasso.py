"""Group lasso: value and gradient against autograd, and its scale."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from surgery_zoo import NETWORKS, SHAPE, kill, traced
from torch import nn

from snugfit.errors import UsageError
from snugfit.surgery import (
    Slot,
    add_penalty_gradient,
    add_penalty_gradients,
    penalised_weights,
    penalty,
    penalty_scale,
)


def slow_penalty(module, groups):
    """Channel by channel, with a graph."""
    tensors = dict(module.named_parameters())
    terms = []
    for group in groups:
        for slot in (*group.producers, *group.readers):
            weight = tensors[slot.tensor]
            if weight.dim() > 1:
                for start in range(0, weight.shape[slot.dim], slot.block):
                    terms.append(weight.narrow(slot.dim, start, slot.block).pow(2).sum().sqrt())
    return torch.stack(terms).sum()


@pytest.mark.parametrize("name", NETWORKS)
def test_value_and_gradient_equal_autograd(name):
    module, groups = traced(NETWORKS[name]())
    expected = slow_penalty(module, groups)
    assert penalty(module, groups) == pytest.approx(expected.item(), rel=1e-12)
    (0.3 * expected).backward()
    wanted = {key: p.grad for key, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    add_penalty_gradients(module, groups, 0.3)
    for key, parameter in module.named_parameters():
        gradient = torch.zeros_like(parameter) if wanted[key] is None else wanted[key]
        assert torch.allclose(parameter.grad, 1 + gradient, rtol=0, atol=1e-12), key


def test_a_zero_channel_has_no_gradient_and_no_nan():
    module, groups = traced(NETWORKS["plain"]())
    kill(module, groups[1].slots, [2])
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    add_penalty_gradients(module, groups, 1.0)
    weight = module.get_parameter("2.0.weight")
    assert weight.grad.isfinite().all()
    assert (weight.grad[0] != 0).all() and weight.grad[2].abs().max() <= 1, "its inputs are still penalised"
    alone = nn.Parameter(torch.zeros(3, 2))
    alone.grad = torch.zeros_like(alone)
    add_penalty_gradient(alone, [Slot("", 0), Slot("", 1)], 1.0)
    assert not alone.grad.any()


def test_weights_in_channels_last_have_the_same_gradient():
    rows = nn.Parameter(torch.randn(4, 6, 3, 3))
    last = nn.Parameter(rows.detach().clone(memory_format=torch.channels_last))
    for parameter in (rows, last):
        parameter.grad = torch.zeros_like(parameter)
        add_penalty_gradient(parameter, [Slot("", 0), Slot("", 1, 2)], 0.5)
    assert torch.allclose(rows.grad, last.grad)


def test_frozen_parameters_are_left_alone():
    module, groups = traced(NETWORKS["plain"]())
    frozen, waiting = module.get_parameter("0.0.weight"), module.get_parameter("2.0.weight")
    frozen.requires_grad_(False)
    add_penalty_gradients(module, groups, 1.0)
    assert frozen.grad is None and waiting.grad is None


def test_the_gradient_can_be_added_as_it_arrives():
    module, groups = traced(NETWORKS["plain"]())
    for name, slots in penalised_weights(module, groups).items():
        parameter = module.get_parameter(name)
        parameter.register_post_accumulate_grad_hook(lambda p, slots=slots: add_penalty_gradient(p, slots, 2.0))
    images = torch.randn(2, *SHAPE, dtype=torch.float64)
    module.eval()(images).sum().mul(0).backward()
    got = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad.zero_()
    add_penalty_gradients(module, groups, 2.0)
    assert all(torch.equal(parameter.grad, got[name]) for name, parameter in module.named_parameters())


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e6), st.floats(0, 0.99))
def test_the_scale_gives_the_ratio(loss, value, ratio):
    scaled = penalty_scale(loss, value, ratio) * value
    assert math.isclose(scaled / (loss + scaled), ratio, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize(
    "arguments", [(1.0, 1.0, 1.0), (1.0, 1.0, -0.1), (math.nan, 1.0, 0.2), (-1.0, 1.0, 0.2), (1.0, 0.0, 0.2)]
)
def test_scales_that_mean_nothing(arguments):
    with pytest.raises(UsageError):
        penalty_scale(*arguments)


def test_without_groups_there_is_no_penalty():
    assert penalty(nn.Linear(2, 2), []) == 0.0
