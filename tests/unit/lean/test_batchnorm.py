"""BatchNorm on running statistics that keeps a factor per channel, against torch's own."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from snugfit.lean import use_lean
from snugfit.memory.tensors import saved_bytes

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def norm(dimensions, channels, affine=True, dtype=torch.float64, **options):
    torch.manual_seed(channels)
    layer = KINDS[dimensions](channels, affine=affine, dtype=dtype, **options)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2)
    return layer.eval()


@settings(deadline=None, max_examples=40)
@given(
    st.integers(2, 5), st.integers(0, 4), st.integers(1, 5), st.integers(1, 4), st.tuples(*[st.booleans()] * 5)
)  # fmt: skip
def test_equals_torchs(assert_as_stock, dimensions, batch, channels, side, flags):
    affine, train_gamma, train_beta, train_input, last = flags
    layer = norm(dimensions, channels, affine)
    if affine:
        layer.weight.requires_grad_(train_gamma)
        layer.bias.requires_grad_(train_beta)
    images = torch.randn(batch, channels, *[side] * (dimensions - 2), dtype=torch.float64)
    if dimensions == 4 and last:
        images = images.to(memory_format=torch.channels_last)
    assert_as_stock(layer, images, train_input=train_input, tolerance=1e-10)


@pytest.mark.parametrize("options", [{"momentum": None}, {"track_running_stats": False}, {}], ids=str)
def test_training_mode_and_batch_statistics_are_torchs(assert_as_stock, options):
    layer = norm(4, 3, **options).requires_grad_(False).train()
    lean = assert_as_stock(layer, torch.randn(4, 3, 5, 5, dtype=torch.float64))
    for mine, theirs in zip(lean.buffers(), layer.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_low_precision_maps_with_weights_in_the_high_one(assert_as_stock, memory_format):
    layer = norm(4, 8, dtype=torch.float32)
    layer.weight.requires_grad_(False)
    images = torch.randn(4, 8, 9, 9).bfloat16().to(memory_format=memory_format)
    assert_as_stock(layer, images, tolerance=2**-7)


def test_statistics_may_change_before_the_backward_pass():
    layer = norm(4, 3).requires_grad_(False)
    use_lean(layer)
    images = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    output = layer(images)
    scale = layer.weight / (layer.running_var + layer.eps).sqrt()
    layer.running_var.mul_(9)
    output.sum().backward()
    torch.testing.assert_close(images.grad, scale.view(1, 3, 1, 1).expand_as(images), rtol=1e-10, atol=1e-10)


def test_what_it_keeps():
    """A factor per channel for the input's gradient, the input for gamma's, nothing for beta's."""
    images, trained = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8, requires_grad=True)
    for gamma, beta in itertools.product((False, True), repeat=2):
        layer = norm(4, 3, dtype=torch.float32)
        use_lean(layer)
        layer.weight.requires_grad_(gamma)
        layer.bias.requires_grad_(beta)
        held = [*layer.parameters(), *layer.buffers()]
        assert saved_bytes(lambda layer=layer: layer(images), held) == (images.nbytes if gamma else 0)
        assert saved_bytes(lambda layer=layer: layer(trained), held) == (images.nbytes if gamma else 3 * 4)


def test_a_wrong_shape_is_refused_as_ever():
    layer = norm(4, 3).requires_grad_(False)
    use_lean(layer)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.randn(2, 3, dtype=torch.float64, requires_grad=True))
