"""Mean and variance of whole feature maps, by which BatchNorm normalises tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.tiling.transport import Transport

CHUNK = 4
"""Images of which the gradient is read twice in a row."""


class Normalised(torch.autograd.Function):
    """Part of a feature map (B, C, h, w), normalised by mean and variance (C,) of the whole one.

    All three get gradients. Autograd's version of the formula keeps two more tensors of the part's size.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Normalise, scale and shift x (B, C, h, w); all other tensors are (C,)."""
        ctx.save_for_backward(x, mean, variance, weight)
        ctx.eps = eps
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all inputs but ``eps``, in their shapes."""
        x, mean, variance, weight = ctx.saved_tensors
        unsaved = mean.new_empty(0)  # CUDA's operator does not take None
        to_x, products, plain = torch.ops.aten.native_batch_norm_backward(
            upper, x, weight, mean, variance, unsaved, unsaved, False, ctx.eps, (ctx.needs_input_grad[0], True, True)
        )
        inverse = torch.rsqrt(variance + ctx.eps)
        scale = inverse if weight is None else inverse * weight
        _, _, _, weight_trains, bias_trains, _ = ctx.needs_input_grad  # nothing trains without ``affine``
        to_weight, to_bias = products if weight_trains else None, plain if bias_trains else None
        return to_x, -scale * plain, -0.5 * scale * inverse * products, to_weight, to_bias, None


def mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C,) of a feature map or a part of one, (B, C, h, w), in float32 or its own wider type.

    BatchNorm's operator walks ``channels_last`` feature maps in memory order; ``var_mean`` does not. For the types of
    autocast it answers in float32 only if it also updates running statistics of that type.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.is_meta:  # the operator has no meta kernel, and planning needs shapes only
        return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)
    unused = [x.new_zeros(x.shape[1], dtype=dtype) for _ in range(2)] if x.dtype != dtype else [None, None]
    mean, variance = torch.ops.aten.batch_norm_update_stats(x, *unused, 0.0)
    return mean, variance


@torch.no_grad()
def add_statistics_gradient(total: Tensor, inputs: Tensor, mean: Tensor, to_mean: Tensor, to_variance: Tensor) -> None:
    """Add the gradients of mean and biased variance (C,) of a feature map to its gradient, both (B, C, H, W)."""
    pixels = inputs.numel() // inputs.shape[1]
    slope = 2 / pixels * to_variance
    shift = to_mean / pixels - slope * mean
    slope, shift = (each.to(total)[:, None, None] for each in (slope, shift))
    for part, values in zip(total.split(CHUNK), inputs.split(CHUNK), strict=True):  # in the processor's cache
        part.addcmul_(values, slope).add_(shift)


@torch.no_grad()
def update_running_statistics(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, pixels: int) -> None:
    """Update a norm's running statistics by the mean and biased variance (C,) of ``pixels`` values per channel."""
    if norm.num_batches_tracked is None or norm.running_mean is None or norm.running_var is None:
        return
    norm.num_batches_tracked.add_(1)
    share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_((variance * (pixels / (pixels - 1))).to(norm.running_var.dtype), share)


def all_moments(
    parts: Sequence[Tensor], counts: Sequence[int], like: Tensor, transport: Transport
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel of parts that all processes hold together.

    Means and sums of squares of parts are combined pairwise (Chan, Golub and LeVeque 1979), because differences of
    plain sums lose digits.

    Args:
        parts: of this process, (B, C, h, w); some may be empty.
        counts: values per channel on each process.
        like: an example tensor (C,) with the type and device of the moments.
        transport: to the other processes.
    """
    own, count = torch.stack([torch.zeros_like(like), torch.zeros_like(like)]), 0
    for part in parts:
        size = part.numel() // len(like)
        if size:
            own, count = _combined(own, count, _sums_of(part, size), size), count + size
    total, count = own, counts[transport.rank] if transport.size == 1 else 0
    if transport.size > 1:
        for other, size in zip(transport.gather(own).wait(), counts, strict=True):
            if size:
                total, count = (_combined(total, count, other, size) if count else other), count + size
    return total[0], total[1] / count


def _sums_of(part: Tensor, size: int) -> Tensor:
    """Mean and sum of squared differences, (2, C), of a part (B, C, h, w) with ``size`` values per channel."""
    mean, variance = mean_and_variance(part)
    return torch.stack([mean, variance * size])


def _combined(first: Tensor, count: int, second: Tensor, more: int) -> Tensor:
    """Mean and sum of squared differences, (2, C), of the union of two sets of values, from those of each, (2, C)."""
    if not count:
        return second
    apart, share = second[0] - first[0], more / (count + more)
    return torch.stack([first[0] + apart * share, first[1] + second[1] + apart * apart * (count * share)])
