"""BatchNorm and activation as one operator, against torch's two."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from snugfit.lean import FusedNormAct
from snugfit.memory.tensors import saved_bytes


def layers(channels, activation, dtype=torch.float64):
    torch.manual_seed(channels)
    norm = nn.BatchNorm2d(channels).to(dtype)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm, activation


def channels_last(*shape, dtype=torch.float64, mean=0.0):
    return (mean + torch.randn(shape, dtype=dtype)).contiguous(memory_format=torch.channels_last)


def both(module_input, gradient, activation, dtype=torch.float64):
    """Outputs, gradients and buffers of the lean operator and of the stock layers."""
    seen = []
    for lean in (True, False):
        norm, act = copy.deepcopy(layers(module_input.shape[1], activation, dtype))
        inputs = module_input.clone(memory_format=torch.preserve_format).requires_grad_()
        output = FusedNormAct(norm, act)(inputs) if lean else act(norm(inputs))
        output.backward(gradient.clone(memory_format=torch.preserve_format))
        seen.append([output, inputs.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()])
    return zip(*seen, strict=True)


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1), nn.LeakyReLU(inplace=True)]
)
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 6), st.integers(1, 6))
def test_equals_the_stock_layers(activation, batch, channels, height, width):
    if batch * height * width < 2:
        return
    shape = (batch, channels, height, width)
    for mine, theirs in both(channels_last(*shape), channels_last(*shape), activation):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_many_chunks_and_a_row_major_gradient():
    shape = (9, 300, 32, 32)
    for mine, theirs in both(channels_last(*shape), torch.randn(shape, dtype=torch.float64), nn.LeakyReLU()):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_single_precision_survives_a_large_mean():
    shape = (8, 16, 12, 12)
    given_ = channels_last(*shape, dtype=torch.float32, mean=300.0), channels_last(*shape, dtype=torch.float32)
    for mine, theirs in both(*given_, nn.LeakyReLU(), torch.float32):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_evaluation_and_cumulative_statistics_go_through_the_stock_layers(momentum):
    norm, act = layers(3, nn.LeakyReLU())
    norm.momentum = momentum
    norm.train(momentum is None)
    images = channels_last(2, 3, 4, 4)
    expected = act(copy.deepcopy(norm)(images))
    assert torch.equal(FusedNormAct(norm, act)(images.requires_grad_()), expected)


def test_it_keeps_nothing_but_its_input():
    map_bytes = 4 * 64 * 32 * 16 * 16
    norm, act = layers(32, nn.LeakyReLU(inplace=True), torch.float32)

    inputs = channels_last(64, 32, 16, 16, dtype=torch.float32).requires_grad_()
    lean = saved_bytes(lambda: FusedNormAct(norm, act)(inputs), [inputs])
    stock = saved_bytes(lambda: act(norm(inputs)), [inputs])
    assert lean < 0.01 * map_bytes and stock >= map_bytes
