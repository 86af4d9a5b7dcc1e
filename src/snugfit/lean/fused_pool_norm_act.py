"""The end of a unit that learns from a pooled feature map: BatchNorm, activation, pooling and the unit's tail fused.

Such a unit never needs its whole feature map. Stock autograd holds up to four (the convolution's output, that of the
activation, and a gradient of each). Here it is one, the convolution's output, which its gradient finally replaces. The
work is done a few images at a time, in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from snugfit.lean.fused_norm_act import FusedNormAct

_CHUNK_VALUES = 1 << 16
"""Values worked on at once, or those of one image if it has more."""
Tail = Callable[[Tensor], Tensor]


class _Affine:
    """BatchNorm with known statistics (C,), and the gradient of the activation after it."""

    def __init__(self, mean: Tensor, inverse: Tensor, weight: Tensor, bias: Tensor, slope: float) -> None:
        self.mean, self.bias, self.slope, self.scale = mean, bias, slope, weight * inverse

    def normalised(self, rows: Tensor, centred: Tensor, out: Tensor) -> None:
        """Write rows (N, C) minus the mean to ``centred``, and the normalised rows to ``out``."""
        torch.sub(rows, self.mean, out=centred)
        torch.addcmul(self.bias, centred, self.scale, out=out)

    def passed_back(self, upper: Tensor, rows: Tensor, centred: Tensor, before: Tensor) -> None:
        """Pass a gradient (N, C) through the activation, in place; also fills ``centred``."""
        self.normalised(rows, centred, before)
        torch.ops.aten.leaky_relu_backward.grad_input(upper, before, self.slope, False, grad_input=upper)


def _rows(maps: Tensor) -> Tensor:
    """A view (N, C) of a channels_last feature map (B, C, H, W)."""
    return maps.permute(0, 2, 3, 1).view(-1, maps.shape[1])


def _parts(maps: Tensor) -> list[slice]:
    """Slices of a few images of (B, C, H, W) each, the first one the longest."""
    step = max(1, _CHUNK_VALUES // max(1, maps[0].numel()))
    return [slice(start, min(start + step, len(maps))) for start in range(0, len(maps), step)]


def _like(maps: Tensor, batch: int) -> Tensor:
    return torch.empty((batch, *maps.shape[1:]), dtype=maps.dtype, device=maps.device).contiguous(
        memory_format=torch.channels_last
    )


@dataclass(frozen=True)
class _Running:
    """Statistics of BatchNorm, (C,) each, and how they are updated."""

    mean: Tensor
    variance: Tensor
    momentum: float
    eps: float


class _FusedPoolNormAct(torch.autograd.Function):
    """(B, C, H, W) to the pooled feature map (B, C, S, S) and to the tail's output, which has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        maps: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: _Running,
        slope: float,
        side: int,
        tail: Tail,
    ) -> tuple[Tensor, Tensor]:
        window = (maps.shape[2] // side, maps.shape[3] // side)
        if maps.is_meta:
            mean = inverse = torch.empty_like(weight)
            pooled, outputs = F.avg_pool2d(maps, window), _meta_outputs(maps, tail)
        else:
            mean, variance = torch.batch_norm_update_stats(maps, running.mean, running.variance, running.momentum)
            inverse = (variance + running.eps).rsqrt_()
            affine = _Affine(mean, inverse, weight, bias, slope)
            pooled, outputs = _run(maps, affine, window, tail)
        ctx.save_for_backward(maps, weight, bias, mean, inverse)
        ctx.slope, ctx.window = slope, window
        ctx.mark_non_differentiable(outputs)
        return pooled, outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Gradients of feature map, weight and bias from (B, C, S, S).

        The saved feature map is overwritten by its own.
        """
        maps, weight, bias, mean, inverse = ctx.saved_tensors
        nothing = (None,) * 4
        if maps.is_meta:
            return maps, torch.empty_like(weight), torch.empty_like(bias), *nothing
        affine = _Affine(mean, inverse, weight, bias, ctx.slope)
        share = (gradient / (ctx.window[0] * ctx.window[1])).contiguous(memory_format=torch.channels_last)
        to_weight, to_bias = _to_parameters(maps, share, affine, inverse)
        _to_maps(maps, share, affine, inverse * to_weight, to_bias)
        return maps, to_weight, to_bias, *nothing


def _meta_outputs(maps: Tensor, tail: Tail) -> Tensor:
    return maps.new_empty((len(maps), *tail(maps[:1]).shape[1:]))


def _run(maps: Tensor, affine: _Affine, window: tuple[int, int], tail: Tail) -> tuple[Tensor, Tensor]:
    height, width = maps.shape[2] // window[0], maps.shape[3] // window[1]
    pooled = maps.new_empty((len(maps), maps.shape[1], height, width))
    parts = _parts(maps)
    scratch = _like(maps, parts[0].stop)
    outputs = _like(tail(scratch[:1].zero_()), len(maps))
    for part in parts:
        values = scratch[: part.stop - part.start]
        affine.normalised(_rows(maps[part]), _rows(values), _rows(values))
        F.leaky_relu_(values, affine.slope)
        pooled[part] = F.avg_pool2d(values, window)
        outputs[part] = tail(values)
    return pooled, outputs


def _pieces(maps: Tensor, share: Tensor, affine: _Affine) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For a few images at a time, as rows (N, C): feature map, gradient before the activation, centred values, scratch.

    The gradient of a pixel is that of its window's mean, ``share`` (B, C, S, S), already divided by the window's size.
    """
    parts, (columns_of, rows_of) = _parts(maps), share.shape[:1:-1]
    upper, centred, before = (_like(maps, parts[0].stop) for _ in range(3))
    height, width = maps.shape[2] // rows_of, maps.shape[3] // columns_of
    for part in parts:
        count = part.stop - part.start
        windows = upper[:count].permute(0, 2, 3, 1).view(count, rows_of, height, columns_of, width, -1)
        of_windows = share[part].permute(0, 2, 3, 1).view(count, rows_of, 1, columns_of, 1, -1)
        windows.copy_(of_windows.expand_as(windows))
        rows = (_rows(maps[part]), _rows(upper[:count]), _rows(centred[:count]), _rows(before[:count]))
        affine.passed_back(rows[1], rows[0], rows[2], rows[3])
        yield rows


def _to_parameters(maps: Tensor, share: Tensor, affine: _Affine, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients (C,) of BatchNorm's weight and bias."""
    to_bias, along = torch.zeros_like(affine.bias), torch.zeros_like(affine.bias)
    for _, upper, centred, scratch in _pieces(maps, share, affine):
        to_bias += upper.sum(0)
        along += torch.mul(upper, centred, out=scratch).sum(0)
    return along * inverse, to_bias


def _to_maps(maps: Tensor, share: Tensor, affine: _Affine, along: Tensor, to_bias: Tensor) -> None:
    """Overwrite the feature map (B, C, H, W) by its gradient."""
    count = maps.numel() // maps.shape[1]
    slant, offset = -affine.scale * along / count, -affine.scale * to_bias / count
    for rows, upper, centred, scratch in _pieces(maps, share, affine):
        torch.addcmul(offset, upper, affine.scale, out=scratch)
        torch.addcmul(scratch, centred, slant, out=rows)


class FusedPoolNormAct(nn.Module):
    """A ``BatchNorm2d``, the ReLU or LeakyReLU after it, pooling for a loss, and the rest of a unit.

    Its input is overwritten in the forward and the backward pass, so nothing else may read it.

    Args:
        layers: norm and activation; their weights are shared.
        side: side of the pooled feature map.
        tail: computes the unit's output from its feature map, without weights.
    """

    def __init__(self, layers: FusedNormAct, side: int, tail: nn.Module) -> None:
        super().__init__()
        self.layers, self.side, self.tail = layers, side, tail

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the pooled feature map, (B, C, S, S), and the unit's output, detached, from (B, C, H, W).

        The feature map is not pooled if its sides cannot be divided by ``side``.
        """
        norm: Any = self.layers.norm
        if maps.shape[2] % self.side or maps.shape[3] % self.side or not self.layers.applies(maps):
            features = self.layers(maps)
            with torch.no_grad():
                return features, self.tail(features.detach())
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        running = _Running(norm.running_mean, norm.running_var, norm.momentum, norm.eps)
        found: tuple[Tensor, Tensor] = _FusedPoolNormAct.apply(
            maps, norm.weight, norm.bias, running, self.layers.slope, self.side, self.tail
        )
        return found
