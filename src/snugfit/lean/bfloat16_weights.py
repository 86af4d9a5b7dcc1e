"""Trained weights in bfloat16: each layer converts its weight to float32 when it runs, forward and backward.

So outputs and gradients are those of float32 layers with the rounded weights, and a step holds the float32 copy of one
weight at a time, never together with that weight's gradient. Gradients are float32. Weights of convolutions and linear
layers are stored so; norms' and other parameters, biases and statistics are small, and stay float32.

Zamirai et al., Revisiting BFloat16 Training (2020): the update must round stochastically, as
:class:`snugfit.lean.optimizer_state.RoundingRule` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.convolution import LeanConv2d, autocast_dtype


class _WidenedLinear(torch.autograd.Function):
    """A linear layer on (..., C) to (..., K), with a weight (K, C) in another type than the inputs'."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        to_inputs, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs if to_weight else None, weight if to_inputs else None)
        return F.linear(inputs, weight.to(inputs.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        to_inputs = None if weight is None else gradient @ weight.to(gradient.dtype)
        to_weight = None if inputs is None else rows.t() @ inputs.reshape(-1, inputs.shape[-1])
        return to_inputs, to_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


class Bfloat16Linear(nn.Linear):
    """``nn.Linear`` whose weight may be bfloat16 where its inputs are not; the state dict is the same."""

    def forward(self, input: Tensor) -> Tensor:
        """Inputs (..., C) to (..., K)."""
        if autocast_dtype(input) is not None or self.weight.dtype == input.dtype:
            return super().forward(input)
        found: Tensor = _WidenedLinear.apply(input, self.weight, self.bias)
        return found


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: LeanConv2d,
    LeanConv2d: LeanConv2d,
    nn.Linear: Bfloat16Linear,
    Bfloat16Linear: Bfloat16Linear,
}


@torch.no_grad()
def store_bfloat16(module: nn.Module) -> None:
    """Round trained weights of convolutions (``nn.Conv2d``, lean or not) and linear layers to bfloat16, in place.

    They are new parameters, rounded to nearest. Subclasses of torch's layers and frozen weights are left unchanged.
    Call :func:`use_float_gradients` once the weights are in place.
    """
    for layer in module.modules():
        weight = layer._parameters["weight"] if type(layer) in _KINDS else None
        if weight is not None and weight.requires_grad:
            layer.__class__ = _KINDS[type(layer)]
            layer._parameters["weight"] = nn.Parameter(weight.to(torch.bfloat16))


def use_float_gradients(module: nn.Module) -> None:
    """Let autograd keep gradients of bfloat16 weights in float32, of any shape, instead of rounding them too."""
    for parameter in module.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32
