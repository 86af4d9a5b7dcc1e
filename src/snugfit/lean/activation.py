"""ReLU, ReLU6 and LeakyReLU that keep one bit per element for their backward pass.

Torch's own keep a map of floats. It is often kept by the next layer too, and then it costs nothing; where that layer's
weight is frozen it does not, and the map is kept for its signs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from snugfit.lean.bits import LEAKY_RELU, RELU, RELU6, Tests, masked, pack
from snugfit.lean.saving import Layout, memory_order, needs_gradient

Forward = Callable[[Tensor], Tensor]


class _Activation(torch.autograd.Function):
    """What an activation passes back is told from its output, so that it may have overwritten its input."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward: Forward, tests: Tests, slope: float) -> Tensor:
        output = forward(inputs)
        if output is inputs:
            ctx.mark_dirty(inputs)
        row = memory_order(output.detach())
        assert row is not None, "a new map fills its memory, and no other is overwritten"
        ctx.save_for_backward(pack(row, tests))
        ctx.layout, ctx.slope = Layout.of(output), slope
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        passed = ctx.layout.empty()
        out = memory_order(passed)
        given = memory_order(gradient) if gradient.stride() == passed.stride() else out
        assert out is not None and given is not None
        if given is out:  # the bits are in the order of the output's memory
            passed.copy_(gradient)
        masked(given, packed, ctx.slope, out)
        return passed, None, None, None


def _activate(inputs: Tensor, forward: Forward, in_place: bool, tests: Tests, slope: float = 0.0) -> Tensor:
    if not needs_gradient(inputs) or (in_place and memory_order(inputs) is None):
        return forward(inputs)
    output: Tensor = _Activation.apply(inputs, forward, tests, slope)  # type: ignore[no-untyped-call]
    return output


class LeanReLU(nn.ReLU):
    """``nn.ReLU`` that keeps a bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        """Map of any shape to one of the same; NaN passes its gradient, as with torch's."""
        return _activate(input, super().forward, self.inplace, RELU)


class LeanReLU6(nn.ReLU6):
    """``nn.ReLU6`` that keeps a bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        """Map of any shape to one of the same; the gradient of NaN is 0, as in torch's vectorised kernel."""
        return _activate(input, super().forward, self.inplace, RELU6)


class LeanLeakyReLU(nn.LeakyReLU):
    """``nn.LeakyReLU`` that keeps a bit per element; torch's own for slopes below 0, which hide the input's sign."""

    def forward(self, input: Tensor) -> Tensor:
        """Map of any shape to one of the same."""
        if self.negative_slope < 0:
            return super().forward(input)
        return _activate(input, super().forward, self.inplace, LEAKY_RELU, self.negative_slope)
