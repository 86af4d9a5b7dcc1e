"""Average pooling that saves nothing for its backward pass.

Torch's poolings save their input, of which the gradient needs the shape alone. Where windows do not overlap, their
backward passes take longer than the convolution before them: 25 % of a step of SmallConv with LLS on two cores. Only
pooling to a single pixel is a plain mean, which saves nothing; but its gradient is row-major, and later operators copy
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.saved_tensors import Layout, needs_gradient


class _EvenPool(torch.autograd.Function):
    """Mean over windows that cover (B, C, H, W) once; the gradient is distributed evenly over each window."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, window: tuple[int, int]) -> Tensor:
        ctx.shape, ctx.window = features.shape, window
        ctx.memory_format = (
            torch.channels_last
            if features.is_contiguous(memory_format=torch.channels_last)
            else torch.contiguous_format
        )
        return F.avg_pool2d(features, window)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        height, width = ctx.window
        batch, channels, rows, columns = gradient.shape
        spread = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device, memory_format=ctx.memory_format)
        windows = spread.permute(0, 2, 3, 1).view(batch, rows, height, columns, width, channels)
        share = (gradient / (height * width)).permute(0, 2, 3, 1)
        windows.copy_(share.reshape(batch, rows, 1, columns, 1, channels).expand_as(windows))
        return spread, None


def average_pool(features: Tensor, side: int) -> Tensor:
    """``F.adaptive_avg_pool2d(features, side)``: (B, C, H, W) to (B, C, side, side)."""
    height, width = features.shape[-2:]
    if height % side or width % side:
        return F.adaptive_avg_pool2d(features, side)
    pooled: Tensor = _EvenPool.apply(features, (height // side, width // side))
    return pooled


class _ShapeOnly(torch.autograd.Function):
    """Any pooling of (B, C, H, W) whose gradient needs only its input's shape."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, pool: Callable[[Tensor], Tensor], spread: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        ctx.layout, ctx.spread = Layout.of(inputs), spread
        return pool(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.spread(gradient, ctx.layout.placeholder()), None, None


class LeanAvgPool2d(nn.AvgPool2d):
    """``nn.AvgPool2d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Feature map (B, C, H, W) or (C, H, W) to (B, C, H', W') or (C, H', W')."""
        if not needs_gradient(input):
            return super().forward(input)
        options = (self.ceil_mode, self.count_include_pad, self.divisor_override)
        sizes = [
            [each, each] if isinstance(each, int) else list(each)
            for each in (self.kernel_size, self.stride, self.padding)
        ]

        def spread(gradient: Tensor, inputs: Tensor) -> Tensor:
            found: Tensor = torch.ops.aten.avg_pool2d_backward(gradient, inputs, *sizes, *options)
            return found

        pooled: Tensor = _ShapeOnly.apply(input, super().forward, spread)
        return pooled


class _SinglePixel(torch.autograd.Function):
    """Mean over a whole feature map (B, C, H, W).

    The gradient has its memory format, to which torch's would be copied.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, pool: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.layout = Layout.of(inputs)
        return pool(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        height, width = ctx.layout.size[-2:]
        return ctx.layout.empty().copy_(gradient / (height * width)), None


class LeanAdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """``nn.AdaptiveAvgPool2d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Feature map (B, C, H, W) or (C, H, W) to (B, C, H', W') or (C, H', W')."""
        if not needs_gradient(input):
            return super().forward(input)
        if self.output_size in (1, (1, 1)):
            single: Tensor = _SinglePixel.apply(input, super().forward)
            return single
        spread = torch.ops.aten._adaptive_avg_pool2d_backward
        pooled: Tensor = _ShapeOnly.apply(input, super().forward, spread)
        return pooled
