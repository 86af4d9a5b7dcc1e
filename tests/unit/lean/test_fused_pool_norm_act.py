"""The end of a unit in one operator, against torch's layers."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from snugfit.lean import FusedNormAct, FusedPoolNormAct

TAILS = {"none": nn.Identity(), "pool": nn.MaxPool2d(2, ceil_mode=True)}


def run(lean, maps, gradient, side, tail, slope=0.1):
    torch.manual_seed(maps.shape[1])
    norm = nn.BatchNorm2d(maps.shape[1]).to(maps.dtype)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    leaf = maps.clone(memory_format=torch.preserve_format).requires_grad_()
    convolved = leaf * 1.0
    if lean:
        pooled, outputs = FusedPoolNormAct(FusedNormAct(norm, nn.LeakyReLU(slope)), side, tail)(convolved)
    else:
        whole = F.leaky_relu(norm(convolved), slope)
        pooled, outputs = F.adaptive_avg_pool2d(whole, side), tail(whole.detach())
    pooled.backward(gradient)
    assert not outputs.requires_grad
    return pooled, outputs, leaf.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()


def check(shape, side, tail, dtype=torch.float64, tolerance=1e-10, mean=0.0):
    maps = (mean + torch.randn(shape, dtype=dtype)).contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(*shape[:2], side, side, dtype=dtype)
    for mine, theirs in zip(*(run(lean, maps, gradient, side, tail) for lean in (True, False)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tail", TAILS)
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 7), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3))
def test_equals_the_stock_layers(tail, batch, channels, side, height, width):
    shape = (batch, channels, side * height, side * width)
    if batch * side * side * height * width > 1:
        check(shape, side, TAILS[tail])


def test_a_side_that_does_not_divide_the_map_leaves_the_map_to_the_loss():
    maps = torch.randn(2, 3, 5, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    norm = nn.BatchNorm2d(3)
    features, outputs = FusedPoolNormAct(FusedNormAct(norm, nn.ReLU()), 2, nn.MaxPool2d(2))(maps * 1.0)
    assert features.shape == (2, 3, 5, 6) and features.requires_grad
    assert torch.equal(outputs, F.max_pool2d(features, 2))


@pytest.mark.parametrize("tail", TAILS)
def test_many_pieces(tail):
    check((37, 64, 16, 16), 2, TAILS[tail])
    check((3, 300, 32, 32), 4, TAILS[tail])


def test_single_precision_survives_a_large_mean():
    check((8, 16, 12, 12), 2, nn.Identity(), torch.float32, 1e-3, mean=300.0)


def test_the_gradient_takes_the_place_of_the_map():
    maps = torch.randn(4, 8, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    convolved = maps * 1.0
    pooled, _ = FusedPoolNormAct(FusedNormAct(nn.BatchNorm2d(8), nn.ReLU()), 2, nn.Identity())(convolved)
    pooled.square().sum().backward()
    assert torch.equal(convolved.detach(), maps.grad)


def test_evaluation_is_the_stock_layers():
    norm = nn.BatchNorm2d(4).eval()
    maps = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    ending = FusedPoolNormAct(FusedNormAct(norm, nn.ReLU()), 2, nn.MaxPool2d(2)).eval()
    expected = F.relu(copy.deepcopy(norm)(maps))
    features, outputs = ending(maps)
    assert torch.equal(features, expected) and torch.equal(outputs, F.max_pool2d(expected, 2))
