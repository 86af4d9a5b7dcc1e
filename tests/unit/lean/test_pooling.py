"""Average pooling that saves nothing, against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit.lean import average_pool, use_lean
from snugfit.memory.tensors import saved_bytes

SHAPES = [(2, 3, 8, 8, 4), (2, 3, 8, 12, 2), (1, 5, 7, 9, 3), (3, 1, 4, 4, 1), (0, 4, 8, 8, 2), (2, 4, 6, 6, 6)]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_adaptive_pooling_in_the_layout_of_its_input(shape, memory_format):
    *sizes, side = shape
    features = torch.randn(sizes, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
    weights = torch.randn(*sizes[:2], side, side, dtype=torch.float64)
    mine, theirs = average_pool(features, side), F.adaptive_avg_pool2d(features, side)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad((mine * weights).sum(), features)
    (expected,) = torch.autograd.grad((theirs * weights).sum(), features)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)
    assert grad.is_contiguous(memory_format=memory_format)


def test_nothing_is_saved_for_backward():
    features = torch.randn(2, 3, 8, 8, requires_grad=True)
    assert saved_bytes(lambda: average_pool(features, 4)) == 0
    assert saved_bytes(lambda: F.adaptive_avg_pool2d(features, 4)) == features.nbytes


def test_gradients_check_out():
    features = torch.randn(2, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: average_pool(x, 2), features)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_single_pixel_passes_its_gradient_in_the_order_of_the_map(memory_format):
    module, features = nn.Sequential(nn.AdaptiveAvgPool2d(1)), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    features = features.contiguous(memory_format=memory_format).requires_grad_()
    upper = torch.randn(2, 3, 1, 1, dtype=torch.float64)
    expected = torch.autograd.grad(module(features), features, upper)[0]
    use_lean(module)
    output = module(features)
    found = torch.autograd.grad(output, features, upper)[0]
    assert torch.equal(found, expected) and torch.equal(output, features.mean((2, 3), keepdim=True))
    assert found.stride() == features.stride()
