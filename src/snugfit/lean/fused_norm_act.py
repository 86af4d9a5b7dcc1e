"""BatchNorm and its activation as one operator that keeps one feature map and allocates none in its backward pass.

Stock autograd keeps the convolution's output for BatchNorm and the activation's output for the activation, and its
backward pass allocates a new one for each: five feature maps at once. Here the sign of the activation's input is
recomputed from the convolution's output, and the incoming gradient is overwritten by the outgoing one: two feature
maps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CHUNK_VALUES = 1 << 17
"""Values worked on at once, so that several passes over them stay in the processor's cache."""


def _chunks(map_: Tensor) -> list[Tensor]:
    """Views (rows, C) of the memory of a feature map, (B, C, H, W) in channels_last."""
    rows = map_.permute(0, 2, 3, 1).reshape(-1, map_.shape[1])
    return list(torch.split(rows, max(1, _CHUNK_VALUES // rows.shape[1])))


class _FusedNormAct(torch.autograd.Function):
    """Training-mode BatchNorm, then LeakyReLU (ReLU at slope 0), of (B, C, H, W)."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor, Tensor],
        momentum: float,
        eps: float,
        slope: float,
    ) -> Tensor:
        output, mean, inverse = torch.native_batch_norm(inputs, weight, bias, *running, True, momentum, eps)
        ctx.save_for_backward(inputs, weight, bias, mean, inverse)
        ctx.slope = slope
        return F.leaky_relu_(output, slope)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of inputs, weight and bias; ``gradient`` (B, C, H, W) itself becomes that of the inputs."""
        inputs, weight, bias, mean, inverse = ctx.saved_tensors
        if gradient.is_meta:
            return gradient, torch.empty_like(weight), torch.empty_like(bias), None, None, None, None
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        pairs = list(zip(_chunks(gradient), _chunks(inputs), strict=True))
        scale, count = weight * inverse, inputs.numel() // inputs.shape[1]
        centred, before = torch.empty_like(pairs[0][0]), torch.empty_like(pairs[0][0])
        to_bias, along = torch.zeros_like(bias), torch.zeros_like(bias)
        for upper, value in pairs:
            rows = len(value)
            torch.sub(value, mean, out=centred[:rows])
            torch.addcmul(bias, centred[:rows], scale, out=before[:rows])
            torch.ops.aten.leaky_relu_backward.grad_input(upper, before[:rows], ctx.slope, False, grad_input=upper)
            to_bias += upper.sum(0)
            along += torch.mul(upper, centred[:rows], out=before[:rows]).sum(0)
        to_weight = along * inverse
        slant, offset = -scale * inverse * to_weight / count, -scale * to_bias / count
        for upper, value in pairs:
            torch.sub(value, mean, out=centred[: len(value)])
            upper.mul_(scale).addcmul_(centred[: len(value)], slant).add_(offset)
        return gradient, to_weight, to_bias, None, None, None, None


class FusedNormAct(nn.Module):
    """A ``BatchNorm2d`` and the ReLU or LeakyReLU after it, sharing their weights.

    In training mode the gradient of its output is overwritten, so nothing else may use it.
    """

    def __init__(self, norm: nn.BatchNorm2d, activation: nn.ReLU | nn.LeakyReLU) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation

    @property
    def slope(self) -> float:
        """Slope for negative values."""
        return float(getattr(self.activation, "negative_slope", 0.0))

    def forward(self, inputs: Tensor) -> Tensor:
        """Feature map (B, C, H, W) to (B, C, H, W)."""
        norm = self.norm
        if not self.applies(inputs):
            stock: Tensor = self.activation(norm(inputs))
            return stock
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        output: Tensor = _FusedNormAct.apply(
            inputs, norm.weight, norm.bias, (norm.running_mean, norm.running_var), norm.momentum, norm.eps, self.slope
        )
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
