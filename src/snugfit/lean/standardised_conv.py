"""Convolution with standardised filters that keeps only its input.

Every filter is scaled to mean 0 and standard deviation 1 before use (Qiao et al., "Weight standardization", equation 5;
the side modules of Rep-Net). Stock autograd keeps three to four copies of every weight for that; here the standardised
weight is recomputed in the backward pass and freed at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.convolution import Geometry, autocast_dtype, convolution_gradients, no_autocast, with_placeholders
from snugfit.lean.saved_tensors import Layout, needs_gradient

EPS = 1e-5
"""Added to the standard deviation of a filter."""


def standardise(weight: Tensor) -> Tensor:
    """Filters (K, C, kh, kw) minus their mean, divided by their unbiased standard deviation plus :data:`EPS`."""
    dims = (1, 2, 3)
    centred, spread = weight - weight.mean(dims, keepdim=True), weight.std(dims, keepdim=True) + EPS
    return centred / spread if centred.requires_grad else centred.div_(spread)


class _StandardisedConvolution(torch.autograd.Function):
    """Feature map (B, C, H, W) to (B, K, H', W'); ``dtype`` is the precision of autocast."""

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
        given = with_placeholders(inputs, made.detach(), layouts, ctx.geometry, None)
        to_inputs, to_made, _ = convolution_gradients(gradient, *given, ctx.geometry, mask)
        to_weight = None if to_made is None else torch.autograd.grad(made, leaf, to_made)[0]
        return to_inputs, to_weight, None, None


class StandardisedConv2d(nn.Conv2d):
    """``nn.Conv2d`` whose filters are standardised whenever it runs; with numeric zero padding and without bias.

    The state dict holds the trained weight. A filter needs at least two values.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not needs_gradient(input, weight):
            stock: Tensor = super()._conv_forward(input, standardise(weight), bias)
            return stock
        dtype = autocast_dtype(input)
        assert not isinstance(self.padding, str)
        geometry = Geometry(self.stride, self.padding, self.dilation, self.groups)
        images = input if dtype is None else input.to(dtype)
        found: Tensor = _StandardisedConvolution.apply(images, weight, geometry, dtype)
        return found
