"""BatchNorm on running statistics that keeps a factor per channel instead of its input.

With running statistics it is an affine function of each channel. Only gamma's gradient needs the input; torch's own
keeps it even if gamma is frozen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.saved_tensors import InplacePermissions, Overwriting, memory_order, needs_gradient, permissions_of


class _FrozenBatchNorm(torch.autograd.Function):
    """Feature map (B, C, ...) to (B, C, ...) with running statistics and a frozen gamma."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        permissions: InplacePermissions,
    ) -> Tensor:
        if ctx.needs_input_grad[0]:
            scale = (variance.double() + eps).rsqrt_()
            ctx.save_for_backward((scale if weight is None else scale.mul_(weight)).to(variance.dtype))
        ctx.bias_dtype, ctx.overwrites = None if bias is None else bias.dtype, permissions.gradient
        if not permissions.input:
            return F.batch_norm(inputs, mean, variance, weight, bias, eps=eps)
        ctx.mark_dirty(inputs)
        return _normalise(inputs, weight, bias, mean, variance, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to_inputs = to_bias = None
        if ctx.needs_input_grad[2]:
            others = [dimension for dimension in range(gradient.dim()) if dimension != 1]
            to_bias = gradient.sum(others, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            (scale,) = ctx.saved_tensors
            to_inputs = _scaled(gradient, scale, ctx.overwrites)
        return to_inputs, None, to_bias, None, None, None, None


def _normalise(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Overwrite a feature map (B, C, ...) with its BatchNorm on running statistics (C,), by torch's own kernel."""
    if not inputs.is_meta:
        mean_, inverse = (torch.empty(0, dtype=mean.dtype, device=mean.device) for _ in range(2))  # not computed
        torch.ops.aten.native_batch_norm.out(
            inputs, weight, bias, mean, variance, False, 0.0, eps, out=inputs, save_mean=mean_, save_invstd=inverse
        )
    return inputs


def _scaled(gradient: Tensor, scale: Tensor, overwrite: bool) -> Tensor:
    """A gradient (B, C, ...) times a factor (C,) per channel, in the gradient's precision."""
    if gradient.dtype == scale.dtype:
        factor = scale.view(-1, *(1,) * (gradient.dim() - 2))
        return gradient.mul_(factor) if overwrite and memory_order(gradient) is not None else gradient * factor
    # A product of two precisions would be a feature map in the higher one; this kernel has the factor in the higher and
    # rounds once. It does not use its input.
    # CUDA's does not take None for saved statistics.
    none, one, unsaved = torch.zeros_like(scale), torch.ones_like(scale), scale.new_empty(0)
    found: Tensor = torch.ops.aten.native_batch_norm_backward(
        gradient, gradient, scale, none, one, unsaved, unsaved, False, 0.0, [True, False, False]
    )[0]
    return found


class _Lean(Overwriting, nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        """Feature map (B, C, ...) to (B, C, ...); torch's own in training mode and where gamma is trained."""
        if (
            self.training
            or self.running_mean is None
            or self.running_var is None
            or (self.weight is not None and self.weight.requires_grad)
        ):
            return super().forward(input)
        permissions = permissions_of(self)
        permissions = permissions._replace(input=permissions.input and _can_overwrite(input, self.running_mean))
        lean = needs_gradient(input, self.bias)
        if not lean and not permissions.input:
            return super().forward(input)
        self._check_input_dim(input)
        given = (input, self.weight, self.bias, self.running_mean, self.running_var, self.eps)
        output: Tensor = _FrozenBatchNorm.apply(*given, permissions) if lean else _normalise(*given)
        return output


def _can_overwrite(inputs: Tensor, mean: Tensor) -> bool:
    """Whether a feature map (B, C, H, W) is on a processor, in the norm's precision, and not a view."""
    if inputs.device.type not in ("cpu", "meta") or inputs.dtype != mean.dtype:
        return False
    if inputs.dim() != 4 or inputs.numel() == 0 or inputs._is_view():
        return False
    return inputs.is_contiguous() or inputs.is_contiguous(memory_format=torch.channels_last)


class LeanBatchNorm1d(_Lean, nn.BatchNorm1d):
    """``nn.BatchNorm1d``, (B, C) or (B, C, L), that keeps no input for running statistics and a frozen gamma."""


class LeanBatchNorm2d(_Lean, nn.BatchNorm2d):
    """``nn.BatchNorm2d``, (B, C, H, W), that keeps no input for running statistics and a frozen gamma."""


class LeanBatchNorm3d(_Lean, nn.BatchNorm3d):
    """``nn.BatchNorm3d``, (B, C, D, H, W), that keeps no input for running statistics and a frozen gamma."""
