"""Convolutions with standardised filters: the formula's numbers, autograd's gradients, and nothing kept but the map."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from snugfit.lean import StandardisedConv2d
from snugfit.memory.tensors import saved_bytes, tensor_peak_bytes


def by_formula(weight):
    rows = []
    for filter_ in weight.flatten(1):
        mean = filter_.sum() / filter_.numel()
        deviation = ((filter_ - mean).square().sum() / (filter_.numel() - 1)).sqrt()
        rows.append((filter_ - mean) / (deviation + 1e-5))
    return torch.stack(rows).view_as(weight)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([1, 3, 5]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.booleans(), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_output_and_gradients_are_those_of_the_formula(kernel, stride, groups, train_input, train_weight, last):
    torch.manual_seed(0)
    layer = StandardisedConv2d(4, 6, kernel, stride, kernel // 2, groups=groups, bias=False).double()
    layer.weight.requires_grad_(train_weight)
    images = torch.randn(3, 4, 7, 6, dtype=torch.float64)
    if last:
        images = images.contiguous(memory_format=torch.channels_last)
    results = []
    for run in (layer, lambda x: F.conv2d(x, by_formula(layer.weight), None, stride, kernel // 2, 1, groups)):
        leaf, layer.weight.grad = images.clone().requires_grad_(train_input), None
        output = run(leaf)
        if train_input or train_weight:
            output.square().sum().backward()
        results.append((output.detach(), leaf.grad, layer.weight.grad))
    for mine, theirs in zip(*results, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_only_the_input_is_kept():
    layer, images = StandardisedConv2d(8, 8, 5, padding=2, groups=2, bias=False), torch.randn(2, 8, 6, 6)
    assert saved_bytes(lambda: layer(images.requires_grad_()), [layer.weight]) == images.numel() * 4


def test_the_backward_pass_takes_three_tensors_like_the_weight():
    layer = StandardisedConv2d(64, 64, 5, padding=2, groups=2, bias=False).to(memory_format=torch.channels_last)
    images = torch.randn(2, 64, 1, 1, requires_grad=True).contiguous(memory_format=torch.channels_last)
    peak = tensor_peak_bytes(lambda: layer(images).sum().backward(), [layer, images])
    assert peak < 4.2 * layer.weight.nbytes, "the weight, what is made of it, its gradient, and their product"


@pytest.mark.parametrize("without", [True, False])
def test_a_constant_filter_has_finite_gradients(without):
    layer = StandardisedConv2d(2, 2, 3, bias=False)
    with torch.no_grad():
        layer.weight[0] = 0.5
    layer(torch.randn(1, 2, 4, 4, requires_grad=not without)).sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_under_autocast_it_computes_in_low_precision_and_the_weight_stays():
    torch.manual_seed(0)
    layer, images = StandardisedConv2d(4, 4, 3, padding=1, bias=False), torch.randn(2, 4, 8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(images)
    output.float().square().sum().backward()
    low = (layer.weight.grad.clone(), images.grad.clone())
    assert output.dtype == torch.bfloat16 and low[0].dtype == low[1].dtype == torch.float32
    layer.weight.grad = images.grad = None
    layer(images).square().sum().backward()
    for mine, theirs in zip(low, (layer.weight.grad, images.grad), strict=True):
        assert (mine - theirs).norm() < 0.02 * theirs.norm()
