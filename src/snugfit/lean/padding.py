"""Padding in the modes of a convolution that keeps nothing for its backward pass.

Torch's own keeps the unpadded feature map, of which the gradient needs the shape alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Frame = tuple[int, ...]
"""Pixels added left, right, above and below."""


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, frame: Frame, mode: str) -> Tensor:
        ctx.size, ctx.frame, ctx.mode = inputs.shape, frame, mode
        return F.pad(inputs, frame, mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        left, right, above, below = ctx.frame
        gradient = _folded(gradient, 2, ctx.size[2], above, below, ctx.mode)
        return _folded(gradient, 3, ctx.size[3], left, right, ctx.mode), None, None


def _folded(gradient: Tensor, dimension: int, size: int, before: int, after: int, mode: str) -> Tensor:
    """Add the gradient of the padding along a dimension of (B, C, H, W) to the pixels that it was copied from."""
    sources = F.pad(torch.arange(size, dtype=torch.float64).view(1, 1, size), (before, after), mode).view(-1)
    sources = sources.to(gradient.device, torch.int64)
    folded = gradient.narrow(dimension, before, size).clone()
    for start, length in ((0, before), (before + size, after)):
        folded.index_add_(dimension, sources[start : start + length], gradient.narrow(dimension, start, length))
    return folded


def pad(inputs: Tensor, frame: Frame, mode: str) -> Tensor:
    """``F.pad`` of (B, C, H, W) to (B, C, H + above + below, W + left + right).

    Args:
        inputs: the feature map, (B, C, H, W).
        frame: pixels added left, right, above and below.
        mode: "constant" (zeros), "reflect", "replicate" or "circular".
    """
    if mode == "constant":  # torch's own keeps nothing either
        return F.pad(inputs, frame)
    padded: Tensor = _Padded.apply(inputs, frame, mode)
    return padded
