"""What lean operators are compared with: torch's own, on the same weights and inputs."""

import copy

import pytest
import torch

from snugfit.lean import use_lean


def _step(module, images, train_input, autocast):
    leaf = images.clone(memory_format=torch.preserve_format).requires_grad_(train_input)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        # not the leaf itself: an in-place layer may overwrite what it is given
        output = module(leaf * 1 if train_input else leaf.clone(memory_format=torch.preserve_format))
    torch.manual_seed(2)
    gradient = torch.randn(output.shape, dtype=torch.float64).to(output.dtype)
    if output.requires_grad:
        output.backward(gradient)
    return [output.detach(), leaf.grad, *(parameter.grad for parameter in module.parameters())]


def _is_both(images):
    """Whether a map is row-major and channels_last at once."""
    return images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)


def _strides(tensor):
    """Strides that mean anything."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@pytest.fixture(scope="session")
def assert_as_stock():
    """Check output and gradients of a module against those of its lean copy, which is returned."""

    def check(stock, images, *, train_input=True, tolerance=0.0, autocast=False):
        lean = copy.deepcopy(stock)
        use_lean(lean)
        for parameter in stock.parameters():
            parameter.grad = None
        ambiguous = images.dim() == 4 and _is_both(images)  # then torch itself may give either layout
        got, want = (_step(module, images, train_input, autocast) for module in (lean, stock))
        for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            assert (mine is None) == (theirs is None), index
            if theirs is not None:
                allowed = tolerance if index else 0.0
                torch.testing.assert_close(mine, theirs, rtol=allowed, atol=allowed, equal_nan=True)
                assert theirs.numel() == 0 or ambiguous or _strides(mine) == _strides(theirs), index
        return lean

    return check
