"""Average pooling to a square map that saves nothing for its backward pass.

torch's own poolings save their input, and their gradients take longer than the convolution before them: 25 % of a step
of SmallConv with LLS on two cores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class _EvenPool(torch.autograd.Function):
    """Mean over windows that tile the map; the gradient is spread evenly over each window."""

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
    pooled: Tensor = _EvenPool.apply(features, (height // side, width // side))  # type: ignore[no-untyped-call]
    return pooled
