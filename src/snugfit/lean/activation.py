"""ReLU, ReLU6 and LeakyReLU that keep one bit per element for their backward pass.

Torch's own keep a feature map of floats. Often the next layer keeps the same one, and it costs nothing. Where that
layer's weight is frozen, it is kept for its signs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.bits import LEAKY_RELU, RELU, RELU6, Tests, masked, pack
from snugfit.lean.inplace_permissions import described, permissions_of
from snugfit.lean.saved_tensors import Layout, memory_order, needs_gradient

Forward = Callable[[Tensor, bool], Tensor]
"""The activation of a feature map (B, C, ...), in place or not."""


class _Activation(torch.autograd.Function):
    """An activation (B, C, ...) whose gradient follows from its output, so that it may overwrite its input."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, forward: Forward, in_place: bool, overwrites: bool, tests: Tests, slope: float
    ) -> Tensor:
        output = forward(inputs, in_place)
        if output is inputs:
            ctx.mark_dirty(inputs)
        row = memory_order(output.detach())
        assert row is not None, "a new feature map fills its memory, and no other is overwritten"
        ctx.save_for_backward(pack(row, tests))
        ctx.layout, ctx.slope, ctx.overwrites = Layout.of(output), slope, overwrites
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        in_order = gradient.stride() == ctx.layout.stride
        given = memory_order(gradient) if in_order else None
        if ctx.overwrites and given is not None:
            masked(given, packed, ctx.slope, given)
            return gradient, *(None,) * 5
        passed = ctx.layout.empty()
        out = memory_order(passed)
        assert out is not None
        if given is None:  # the bits are in the order of the output's memory
            given = out
            passed.copy_(gradient)
        masked(given, packed, ctx.slope, out)
        return passed, *(None,) * 5


def _activate(layer: nn.Module, inputs: Tensor, forward: Forward, tests: Tests, slope: float = 0.0) -> Tensor:
    permissions = permissions_of(layer)
    in_place = bool(layer.inplace) or (permissions.input and not inputs._is_view() and memory_order(inputs) is not None)
    if not needs_gradient(inputs) or (in_place and memory_order(inputs) is None):
        return forward(inputs, in_place)
    output: Tensor = _Activation.apply(inputs, forward, in_place, permissions.gradient, tests, slope)
    return output


class LeanReLU(nn.ReLU):
    """``nn.ReLU`` that keeps a bit per element."""

    def extra_repr(self) -> str:
        """Torch's description, and what may be overwritten."""
        return described(self, super().extra_repr())

    def forward(self, input: Tensor) -> Tensor:
        """Feature map of any shape to one of the same shape; NaN passes its gradient, as in torch."""
        return _activate(self, input, F.relu, RELU)


class LeanReLU6(nn.ReLU6):
    """``nn.ReLU6`` that keeps a bit per element."""

    def extra_repr(self) -> str:
        """Torch's description, and what may be overwritten."""
        return described(self, super().extra_repr())

    def forward(self, input: Tensor) -> Tensor:
        """Feature map of any shape to one of the same shape.

        The gradient of NaN is 0, as in torch's vectorised kernel.
        """
        return _activate(self, input, _relu6, RELU6)


def _relu6(inputs: Tensor, in_place: bool) -> Tensor:
    return F.hardtanh(inputs, 0.0, 6.0, in_place)


class LeanLeakyReLU(nn.LeakyReLU):
    """``nn.LeakyReLU`` that keeps a bit per element; torch's own for negative slopes, which hide the input's sign."""

    def extra_repr(self) -> str:
        """Torch's description, and what may be overwritten."""
        return described(self, super().extra_repr())

    def forward(self, input: Tensor) -> Tensor:
        """Feature map of any shape to one of the same shape."""
        slope = self.negative_slope
        if slope < 0:
            return super().forward(input)
        return _activate(self, input, lambda values, in_place: F.leaky_relu(values, slope, in_place), LEAKY_RELU, slope)
