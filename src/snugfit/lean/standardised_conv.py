"""Convolution with standardised filters that keeps its input and nothing else.

Every filter is brought to mean 0 and standard deviation 1 before it is used (Qiao et al., "Weight standardization",
equation 5; the side modules of Rep-Net). Stock autograd would keep three to four copies of every weight for that; here
the standardised weight is made anew in the backward pass, and gone again at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.convolution import Geometry, autocast_dtype, gradients_of, no_autocast, with_stand_ins
from snugfit.lean.saved_tensors import Layout, needs_gradient

EPS = 1e-5
"""Added to the standard deviation of a filter."""


def standardise(weight: Tensor) -> Tensor:
    """Filters (K, C, kh, kw) less their mean, divided by their unbiased standard deviation and :data:`EPS`."""
    dims = (1, 2, 3)
    centred, spread = weight - weight.mean(dims, keepdim=True), weight.std(dims, keepdim=True) + EPS
    return centred / spread if centred.requires_grad else centred.div_(spread)


class _StandardisedConvolution(torch.autograd.Function):
    """Map (B, C, H, W) to (B, K, H', W'); ``dtype`` is the precision that autocast asks for."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, geometry: Geometry, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        ctx.layout, ctx.geometry, ctx.dtype = Layout.of(inputs), geometry, dtype
        with no_autocast(inputs, dtype):
            return F.conv2d(inputs, standardise(weight).to(dtype or weight.dtype), None, *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        mask = [*ctx.needs_input_grad[:2], False]
        with torch.enable_grad():
            leaf = weight.detach().requires_grad_()
            made = standardise(leaf).to(ctx.dtype or weight.dtype)
        layouts = (ctx.layout, Layout.of(made))
        given = with_stand_ins(inputs, made.detach(), layouts, ctx.geometry, None)
        to_inputs, to_made, _ = gradients_of(gradient, *given, ctx.geometry, mask)
        to_weight = None if to_made is None else torch.autograd.grad(made, leaf, to_made)[0]
        return to_inputs, to_weight, None, None


class StandardisedConv2d(nn.Conv2d):
    """``nn.Conv2d`` whose filters are standardised whenever it runs; zero padding given in numbers, and no bias.

    The state dict holds the weight as it trains. A filter needs at least two values.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not needs_gradient(input, weight):
            stock: Tensor = super()._conv_forward(input, standardise(weight), bias)
            return stock
        dtype = autocast_dtype(input)
        geometry = Geometry(self.stride, self.padding, self.dilation, self.groups)  # type: ignore[arg-type]
        images = input if dtype is None else input.to(dtype)
        found: Tensor = _StandardisedConvolution.apply(images, weight, geometry, dtype)
        return found
