"""Convolution that keeps its input only for a trained weight, and its weight only for an input with a gradient.

Torch's own keeps both whatever is frozen, so freezing saves no memory. Where everything is trained there is nothing to
save, and it equals torch's own except for the weight gradient on small feature maps
(:mod:`snugfit.lean.conv_weight_grad`).
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.conv_weight_grad import SMALL_MAP, Pair, conv_weight_gradient
from snugfit.lean.padding import Frame, pad
from snugfit.lean.saved_tensors import Layout, needs_gradient


class Geometry(NamedTuple):
    """How a convolution's kernel moves over the feature map."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


class _LeanConvolution(torch.autograd.Function):
    """Feature map (B, C, H, W) to (B, K, H', W').

    Under autocast, ``dtype`` is the low precision, in which the input is given. The weight is kept as it is, and
    lowered again in the backward pass: a lowered copy of every frozen weight would live from one pass to the other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        by_position: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        to_inputs, to_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(inputs if to_weight else None, weight if to_inputs else None)
        ctx.layouts, ctx.geometry, ctx.by_position, ctx.dtype = (
            (Layout.of(inputs), Layout.of(weight)),
            geometry,
            by_position,
            dtype,
        )
        if dtype is None:
            return F.conv2d(inputs, weight, bias, *geometry)
        with no_autocast(inputs, dtype):
            return F.conv2d(inputs, weight.to(dtype), None if bias is None else bias.to(dtype), *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        to_inputs, to_weight, to_bias = ctx.needs_input_grad[:3]
        mask = [to_inputs, to_weight and not ctx.by_position, to_bias and to_weight and not ctx.by_position]
        found: list[Tensor | None] = [None, None, None]
        if any(mask):
            given = with_placeholders(inputs, weight, ctx.layouts, ctx.geometry, ctx.dtype)
            found[:] = convolution_gradients(gradient, *given, ctx.geometry, mask)
        if ctx.by_position:
            stride, padding, dilation, _ = ctx.geometry
            kernel = tuple(ctx.layouts[1].size[2:])
            found[1] = conv_weight_gradient(gradient, inputs, kernel, stride, padding, dilation)
        if to_bias and not mask[2]:  # oneDNN would compute the weight's gradient on the way
            found[2] = gradient.sum((0, 2, 3))
        return (*found, None, None, None)


def convolution_gradients(
    gradient: Tensor, inputs: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of input (B, C, H, W), weight (K, C, kh, kw) and bias (K,) where ``mask`` is set.

    One of input and weight may be a placeholder. The gradient of the output is (B, K, H', W').
    """
    stride, padding, dilation, groups = geometry
    found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        gradient, inputs, weight, [len(weight)], stride, padding, dilation, False, (0, 0), groups, mask
    )
    return tuple(each if wanted else None for each, wanted in zip(found, mask, strict=True))


def with_placeholders(
    inputs: Tensor | None,
    weight: Tensor | None,
    layouts: tuple[Layout, Layout],
    geometry: Geometry,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Input (B, C, H, W) and weight (K, C, kh, kw), with a placeholder without memory for one that was not kept."""
    of_inputs, of_weight = layouts
    if dtype is not None:
        of_weight = of_weight._replace(dtype=dtype)
        weight = None if weight is None else weight.to(dtype)
    pair = (
        of_inputs.placeholder() if inputs is None else inputs,
        of_weight.placeholder() if weight is None else weight,
    )
    if pair[0].is_meta:
        return pair
    backend = _backend(*pair, geometry)
    if _needs_memory(*pair, geometry, backend):
        return (of_inputs.empty() if inputs is None else inputs, of_weight.empty() if weight is None else weight)
    order = torch._C._conv_determine_backend_memory_format(*pair, backend)
    return (
        of_inputs.ordered(order).placeholder() if inputs is None else inputs,
        of_weight.ordered(order).placeholder() if weight is None else weight,
    )


def _backend(inputs: Tensor, weight: Tensor, geometry: Geometry) -> Any:
    """The kernel that torch selects for an input (B, C, H, W) and a weight (K, C, kh, kw)."""
    stride, padding, dilation, groups = (list(each) if isinstance(each, tuple) else each for each in geometry)
    return torch._C._select_conv_backend(inputs, weight, None, stride, padding, dilation, False, [0, 0], groups, None)


def _needs_memory(inputs: Tensor, weight: Tensor, geometry: Geometry, backend: Any) -> bool:
    """Whether the kernel copies or splits its input (B, C, H, W) or weight (K, C, kh, kw) without reading values."""
    if not (_is_plain(inputs) and _is_plain(weight)):
        return True
    return (geometry.groups > 1 or max(geometry.dilation) > 1) and backend.name.startswith("Slow")


def _is_plain(tensor: Tensor) -> bool:
    """Whether (B, C, H, W) has one of the two memory formats, including the strides of dimensions of size 1.

    Kernels copy other layouts, and additions of single samples produce such layouts.
    """
    _, channels, height, width = tensor.shape
    plane, sample = height * width, channels * height * width
    return tensor.stride() in ((sample, plane, width, 1), (sample, 1, width * channels, channels))


class LeanConv2d(nn.Conv2d):
    """``nn.Conv2d`` that keeps only what the requested gradients need; the state dict is the same."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = autocast_dtype(input)
        by_position = weight.requires_grad and dtype is None and self._is_small(input)
        if not needs_gradient(input, weight, bias) or not (by_position or _is_lean(input, weight, dtype)):
            stock: Tensor = super()._conv_forward(input, weight, bias)
            return stock
        images = input if dtype is None else input.to(dtype)
        if input.dim() == 3:
            images = images.unsqueeze(0)
        frame, mode, padding = self._frame()
        if any(frame):
            images = pad(images, frame, mode)
        geometry = Geometry(self.stride, padding, self.dilation, self.groups)
        output: Tensor = _LeanConvolution.apply(images, weight, bias, geometry, by_position, dtype)
        return output.squeeze(0) if input.dim() == 3 else output

    def _frame(self) -> tuple[Frame, str, Pair]:
        """Pixels to pad before the convolution, the mode, and the zero padding of the convolution itself."""
        if self.padding_mode != "zeros":
            return tuple(self._reversed_padding_repeated_twice), self.padding_mode, (0, 0)
        if not isinstance(self.padding, str):
            return (0, 0, 0, 0), "constant", self.padding
        if self.padding == "valid":
            return (0, 0, 0, 0), "constant", (0, 0)
        rows, columns = (
            dilation * (kernel - 1) for dilation, kernel in zip(self.dilation, self.kernel_size, strict=True)
        )
        return (0, columns % 2, 0, rows % 2), "constant", (rows // 2, columns // 2)

    def _is_small(self, inputs: Tensor) -> bool:
        """Whether to compute the weight gradient by kernel position, for inputs (B, C, H, W)."""
        if self.groups > 1 or self.padding_mode != "zeros" or isinstance(self.padding, str) or inputs.dim() != 4:
            return False
        if inputs.device.type == "cuda":
            return False
        sizes = zip(inputs.shape[2:], self.padding, self.dilation, self.kernel_size, self.stride, strict=True)
        pixels = 1
        for size, padding, dilation, kernel, stride in sizes:
            pixels *= (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        return pixels <= SMALL_MAP


def no_autocast(inputs: Tensor, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Disable autocast for inputs (B, C, H, W); no effect if ``dtype`` is None, which means no autocast.

    Autocast would cache a copy that it makes inside an operator of ours, which has no graph, and reuse it elsewhere.
    """
    return contextlib.nullcontext() if dtype is None else torch.autocast(_state_device(inputs), enabled=False)


def autocast_dtype(inputs: Tensor) -> torch.dtype | None:
    """The precision to which autocast lowers a convolution of inputs (B, C, H, W); None outside autocast."""
    kind = _state_device(inputs)
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _state_device(inputs: Tensor) -> str:
    """The device whose autocast state applies to a tensor of any shape.

    The meta device has none and stands for a CPU.
    """
    return "cpu" if inputs.is_meta else inputs.device.type


def _is_lean(inputs: Tensor, weight: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether there is anything to save for an input (B, C, H, W) and a weight (K, C, kh, kw).

    Torch's own keeps input and weight, and under autocast lowered copies.
    """
    if dtype is not None and torch.float64 in (inputs.dtype, weight.dtype):
        return False  # autocast leaves doubles alone
    if inputs.dim() not in (3, 4):
        return False  # torch raises the error
    return not weight.requires_grad or (dtype is not None and not inputs.requires_grad)
