"""BatchNorm on running statistics that keeps a factor per channel instead of its input.

With running statistics it is an affine map of every channel. Of its input only gamma's gradient has need; torch's own
keeps it whatever is frozen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.saving import needs_gradient


class _FrozenBatchNorm(torch.autograd.Function):
    """Map (B, C, ...) to (B, C, ...) with running statistics and a gamma that does not train."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        if ctx.needs_input_grad[0]:
            scale = (variance.double() + eps).rsqrt_()
            ctx.save_for_backward((scale if weight is None else scale.mul_(weight)).to(variance.dtype))
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.batch_norm(inputs, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to_inputs = to_bias = None
        if ctx.needs_input_grad[0]:
            to_inputs = _scaled(gradient, *ctx.saved_tensors)
        if ctx.needs_input_grad[2]:
            others = [dimension for dimension in range(gradient.dim()) if dimension != 1]
            to_bias = gradient.sum(others, dtype=ctx.bias_dtype)
        return to_inputs, None, to_bias, None, None, None


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """A gradient (B, C, ...) times a factor (C,) per channel, in the gradient's precision."""
    if gradient.dtype == scale.dtype:
        return gradient * scale.view(-1, *(1,) * (gradient.dim() - 2))
    # A product of two precisions would be a map in the higher one; this kernel has the factor in the higher and rounds
    # once. The input that it asks for is not used.
    none, one = torch.zeros_like(scale), torch.ones_like(scale)
    found: Tensor = torch.ops.aten.native_batch_norm_backward(
        gradient, gradient, scale, none, one, None, None, False, 0.0, [True, False, False]
    )[0]
    return found


class _Lean(nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        """Map (B, C, ...) to (B, C, ...); torch's own in training mode and where gamma trains."""
        if (
            self.training or self.running_mean is None or self.running_var is None
            or (self.weight is not None and self.weight.requires_grad)
            or not needs_gradient(input, self.bias)
        ):  # fmt: skip
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output: Tensor = _FrozenBatchNorm.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.running_mean, self.running_var, self.eps
        )
        return output


class LeanBatchNorm1d(_Lean, nn.BatchNorm1d):
    """``nn.BatchNorm1d``, (B, C) or (B, C, L), that keeps no input for running statistics and a frozen gamma."""


class LeanBatchNorm2d(_Lean, nn.BatchNorm2d):
    """``nn.BatchNorm2d``, (B, C, H, W), that keeps no input for running statistics and a frozen gamma."""


class LeanBatchNorm3d(_Lean, nn.BatchNorm3d):
    """``nn.BatchNorm3d``, (B, C, D, H, W), that keeps no input for running statistics and a frozen gamma."""
