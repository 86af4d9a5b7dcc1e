"""Address space for kernels: only around operators that generate them, and never beyond the budget."""

import pytest
import torch
from torch import nn

from snugfit.memory.address_space import KERNEL_BYTES, KernelAllowance


class Recorded:
    """A limit that notes what it was asked for."""

    def __init__(self, left_bytes=10**9):
        self.left_bytes, self.asked = left_bytes, []

    def refresh(self, extra_bytes=0):
        self.asked.append(extra_bytes)


def test_the_limit_is_exact_before_and_after_an_operator_that_generates_kernels():
    limit = Recorded()
    with KernelAllowance(limit):
        torch.ones(3, 4) @ torch.ones(4, 2)
    assert limit.asked == [0, 0]


def test_other_operators_may_use_all_that_is_left():
    limit = Recorded(left_bytes=0)
    with KernelAllowance(limit):
        torch.ones(100).add(1).view(10, 10).sum()
    assert limit.asked == []


def step():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    loss = network(images).square().sum()
    loss.backward()
    return [loss.detach(), images.grad, *(parameter.grad for parameter in network.parameters())]


def test_results_are_the_same_and_forward_and_backward_are_covered():
    limit, want = Recorded(), step()
    with KernelAllowance(limit):
        got = step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))
    assert limit.asked == [0, 0] * 5  # convolution, its backward pass, linear, and two products behind it


@pytest.mark.parametrize(("left", "refused"), [(0, False), (-1, True)])
def test_outputs_and_kernels_must_fit_into_what_the_budget_has_left(left, refused):
    limit = Recorded(10 * 20 * 4 + KERNEL_BYTES + left)
    first, second = torch.ones(10, 3), torch.ones(3, 20)
    with KernelAllowance(limit):
        if refused:
            with pytest.raises(MemoryError, match="out of memory"):
                first @ second
        else:
            first @ second
    assert limit.asked == ([] if refused else [0, 0])


@pytest.mark.parametrize(("kernel", "side", "workspace"), [(3, 2, True), (3, 3, False), (5, 9, True)])
def test_the_workspace_for_the_gradient_of_a_depthwise_weight_must_fit_too(kernel, side, workspace):
    weight = torch.ones(32, 1, kernel, kernel, requires_grad=True)
    images = torch.ones(1, 32, side, side).contiguous(memory_format=torch.channels_last)
    output = nn.functional.conv2d(images, weight, padding=kernel // 2, groups=32)
    padded = 16 * 16 * weight.nbytes
    limit = Recorded(padded + weight.nbytes + KERNEL_BYTES - 1 if workspace else KERNEL_BYTES * 2)
    with KernelAllowance(limit):
        if workspace:
            with pytest.raises(MemoryError, match="out of memory"):
                output.sum().backward()
            limit.left_bytes += 1
            nn.functional.conv2d(images, weight, padding=kernel // 2, groups=32).sum().backward()
        else:
            output.sum().backward()


def test_the_limit_is_exact_after_an_error():
    limit = Recorded()
    with KernelAllowance(limit), pytest.raises(RuntimeError):
        torch.ones(3, 4) @ torch.ones(3, 4)
    assert limit.asked in ([], [0, 0])


def test_what_is_only_looked_at_takes_nothing():
    limit = Recorded(left_bytes=0)
    with KernelAllowance(limit):
        assert (torch.ones(10, 3, device="meta") @ torch.ones(3, 20, device="meta")).shape == (10, 20)
    assert limit.asked == []
