"""BatchNorm and its activation as one operator, alone or with pooling and the rest of a unit.

Stock autograd keeps the convolution's output for BatchNorm and the activation's output for the activation, and its
backward pass allocates a new feature map for each. Here the sign of the activation's input is recomputed from the
convolution's output, and gradients overwrite what they replace: two feature maps, or one if the loss reads only a
pooled one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CHUNK_VALUES = 1 << 17
_POOLED_CHUNK_VALUES = 1 << 16
"""Values worked on at once, so that several passes over them stay in the processor's cache; at least one image."""
Tail = Callable[[Tensor], Tensor]


class _Settings(NamedTuple):
    """Running statistics of BatchNorm, (C,) each, how they are updated, and the activation's slope below 0."""

    mean: Tensor
    variance: Tensor
    momentum: float
    eps: float
    slope: float


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


class _FusedNormAct(torch.autograd.Function):
    """Training-mode BatchNorm, then LeakyReLU (ReLU at slope 0), of (B, C, H, W)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, settings: _Settings) -> Tensor:
        running_mean, running_var, momentum, eps, ctx.slope = settings
        output, mean, inverse = torch.native_batch_norm(
            inputs, weight, bias, running_mean, running_var, True, momentum, eps
        )
        ctx.save_for_backward(inputs, weight, bias, mean, inverse)
        return F.leaky_relu_(output, ctx.slope)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of inputs, weight and bias; ``gradient`` (B, C, H, W) itself becomes that of the inputs."""
        inputs, weight, bias, mean, inverse = ctx.saved_tensors
        if gradient.is_meta:
            return gradient, torch.empty_like(weight), torch.empty_like(bias), None
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        affine, count = _Affine(mean, inverse, weight, bias, ctx.slope), inputs.numel() // inputs.shape[1]
        chunks = (torch.split(_rows(each), max(1, _CHUNK_VALUES // each.shape[1])) for each in (gradient, inputs))
        pairs = list(zip(*chunks, strict=True))
        centred, before = torch.empty_like(pairs[0][0]), torch.empty_like(pairs[0][0])
        to_bias, along = torch.zeros_like(bias), torch.zeros_like(bias)
        for upper, rows in pairs:
            affine.passed_back(upper, rows, centred[: len(rows)], before[: len(rows)])
            to_bias += upper.sum(0)
            along += torch.mul(upper, centred[: len(rows)], out=before[: len(rows)]).sum(0)
        to_weight = along * inverse
        slant, offset = -affine.scale * inverse * to_weight / count, -affine.scale * to_bias / count
        for upper, rows in pairs:
            torch.sub(rows, mean, out=centred[: len(rows)])
            upper.mul_(affine.scale).addcmul_(centred[: len(rows)], slant).add_(offset)
        return gradient, to_weight, to_bias, None


class FusedNormAct(nn.Module):
    """A ``BatchNorm2d`` and the ReLU or LeakyReLU after it, sharing their weights.

    In training mode the gradient of its output is overwritten, so nothing else may use it.
    """

    def __init__(self, norm: nn.BatchNorm2d, activation: nn.ReLU | nn.LeakyReLU) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation

    def forward(self, inputs: Tensor) -> Tensor:
        """Feature map (B, C, H, W) to (B, C, H, W)."""
        if not self.applies(inputs):
            stock: Tensor = self.activation(self.norm(inputs))
            return stock
        output: Tensor = _FusedNormAct.apply(inputs, self.norm.weight, self.norm.bias, self.track())
        return output

    def applies(self, inputs: Tensor) -> bool:
        """Whether a feature map (B, C, H, W) can be fused: in training on a processor, in channels_last."""
        norm = self.norm
        return (
            norm.training
            and norm.affine
            and norm.track_running_stats
            and norm.momentum is not None
            and inputs.device.type in ("cpu", "meta")
            and inputs.dtype == norm.weight.dtype
            and inputs.requires_grad
            and torch.is_grad_enabled()
            and inputs[:, 0].numel() > 1
            and (inputs.is_meta or inputs.is_contiguous(memory_format=torch.channels_last))
        )

    def track(self) -> _Settings:
        """Count a batch, and return what a fused step reads and updates."""
        norm: Any = self.norm
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        slope = float(getattr(self.activation, "negative_slope", 0.0))
        return _Settings(norm.running_mean, norm.running_var, norm.momentum, norm.eps, slope)


def _parts(maps: Tensor) -> list[slice]:
    """Slices of a few images of (B, C, H, W) each, the first one the longest."""
    step = max(1, _POOLED_CHUNK_VALUES // max(1, maps[0].numel()))
    return [slice(start, min(start + step, len(maps))) for start in range(0, len(maps), step)]


def _like(maps: Tensor, batch: int) -> Tensor:
    like = torch.empty((batch, *maps.shape[1:]), dtype=maps.dtype, device=maps.device)
    return like.contiguous(memory_format=torch.channels_last)


class _FusedPoolNormAct(torch.autograd.Function):
    """(B, C, H, W) to the pooled feature map (B, C, S, S) and to the tail's output, which has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, maps: Tensor, weight: Tensor, bias: Tensor, settings: _Settings, side: int, tail: Tail
    ) -> tuple[Tensor, Tensor]:
        window = (maps.shape[2] // side, maps.shape[3] // side)
        if maps.is_meta:
            mean = inverse = torch.empty_like(weight)
            outputs = maps.new_empty((len(maps), *tail(maps[:1]).shape[1:]))
            pooled = F.avg_pool2d(maps, window)
        else:
            mean, variance = torch.batch_norm_update_stats(maps, settings.mean, settings.variance, settings.momentum)
            inverse = (variance + settings.eps).rsqrt_()
            pooled, outputs = _run(maps, _Affine(mean, inverse, weight, bias, settings.slope), window, tail)
        ctx.save_for_backward(maps, weight, bias, mean, inverse)
        ctx.slope, ctx.window = settings.slope, window
        ctx.mark_non_differentiable(outputs)
        return pooled, outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Gradients from (B, C, S, S); that of the feature map overwrites the saved feature map."""
        maps, weight, bias, mean, inverse = ctx.saved_tensors
        if maps.is_meta:
            return maps, torch.empty_like(weight), torch.empty_like(bias), None, None, None
        affine = _Affine(mean, inverse, weight, bias, ctx.slope)
        share = (gradient / (ctx.window[0] * ctx.window[1])).contiguous(memory_format=torch.channels_last)
        to_bias, along = torch.zeros_like(bias), torch.zeros_like(bias)
        for _, upper, centred, scratch in _pieces(maps, share, affine):
            to_bias += upper.sum(0)
            along += torch.mul(upper, centred, out=scratch).sum(0)
        to_weight, count = along * inverse, maps.numel() // maps.shape[1]
        slant, offset = -affine.scale * (inverse * to_weight) / count, -affine.scale * to_bias / count
        for rows, upper, centred, scratch in _pieces(maps, share, affine):
            torch.addcmul(offset, upper, affine.scale, out=scratch)
            torch.addcmul(scratch, centred, slant, out=rows)
        return maps, to_weight, to_bias, None, None, None


def _run(maps: Tensor, affine: _Affine, window: tuple[int, int], tail: Tail) -> tuple[Tensor, Tensor]:
    """The pooled feature map (B, C, S, S) and the tail's output of (B, C, H, W), a few images at a time."""
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


class FusedPoolNormAct(nn.Module):
    """A ``BatchNorm2d``, the ReLU or LeakyReLU after it, pooling for a loss, and the rest of a unit.

    Its input is overwritten in the forward and the backward pass, so nothing else may read it. The work is done a few
    images at a time, in the processor's cache.

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
        if maps.shape[2] % self.side or maps.shape[3] % self.side or not self.layers.applies(maps):
            features = self.layers(maps)
            with torch.no_grad():
                return features, self.tail(features.detach())
        norm = self.layers.norm
        found: tuple[Tensor, Tensor] = _FusedPoolNormAct.apply(
            maps, norm.weight, norm.bias, self.layers.track(), self.side, self.tail
        )
        return found
