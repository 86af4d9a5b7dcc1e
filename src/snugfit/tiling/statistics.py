"""Mean and variance of whole maps, over which BatchNorm normalises tiles: sums over every pixel once (NOTES 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class BatchStatistics(torch.autograd.Function):
    """Mean and biased variance (C,) of a map (B, C, H, W); the backward pass needs one map of room."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of every channel."""
        variance, mean = torch.var_mean(inputs, (0, 2, 3), correction=0)
        ctx.save_for_backward(inputs, mean)
        return mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_mean: Tensor, to_variance: Tensor) -> Tensor:
        """What they pass back to every pixel."""
        inputs, mean = ctx.saved_tensors
        pixels = inputs.numel() // inputs.shape[1]
        found: Tensor = (inputs - mean[:, None, None]).mul_((2 / pixels * to_variance)[:, None, None])
        return found.add_((to_mean / pixels)[:, None, None])


@torch.no_grad()
def track(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, pixels: int) -> None:
    """Renew a norm's running statistics, as a forward pass in training mode does.

    Args:
        norm: the layer.
        mean, variance: of its batch, (C,); the variance is the biased one.
        pixels: values per channel.
    """
    if norm.num_batches_tracked is None or norm.running_mean is None or norm.running_var is None:
        return
    norm.num_batches_tracked.add_(1)
    share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_((variance * (pixels / (pixels - 1))).to(norm.running_var.dtype), share)
