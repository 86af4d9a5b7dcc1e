"""Average pooling that saves nothing, against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from snugfit.lean import average_pool
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
