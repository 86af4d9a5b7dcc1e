"""Convolutions that keep only what the requested gradients need.

Torch's own keeps input and weight whatever is frozen, so freezing saves no memory. Where everything is trained there is
nothing to save, and :class:`LeanConv2d` equals torch's own except for the weight gradient on small feature maps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.saved_tensors import Layout, needs_gradient

SMALL_MAP = 16
"""Up to this many output pixels the weight gradient is computed by kernel position; above, oneDNN is as good."""
COPIED_VALUES = 1 << 14
"""A weight gradient by kernel position copies at most as many values at once as the weight has, or this many if the
weight has fewer, and at least those of one image."""
EPS = 1e-5
"""Added to the standard deviation of a filter."""
Pair = tuple[int, ...]
"""Rows and columns, as torch types them."""
Frame = tuple[int, ...]
"""Pixels added left, right, above and below."""


class Geometry(NamedTuple):
    """How a convolution's kernel moves over the feature map."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


class _LeanConvolution(torch.autograd.Function):
    """Feature map (B, C, H, W) to (B, K, H', W').

    ``dtype`` is the type of the input, if the weight has another: the low precision of autocast, or float32 for a
    weight in bfloat16. The weight is converted again in the backward pass: copies of all weights would live from one
    pass to the other. Unless ``computes``, the output is a placeholder without memory.
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
        computes: bool,
    ) -> Tensor:
        to_inputs, to_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(inputs if to_weight else None, weight if to_inputs else None)
        ctx.layouts, ctx.geometry = (Layout.of(inputs), Layout.of(weight)), geometry
        ctx.by_position, ctx.dtype = by_position, dtype
        if not computes:
            size = output_size(inputs.shape[2:], weight.shape[2:], geometry)
            return inputs.new_empty(1, dtype=dtype).expand(len(inputs), len(weight), *size)
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
        for part in _separated(mask) if ctx.layouts[1].dtype == torch.bfloat16 else [mask]:
            if any(part):
                needed = weight if part[0] else None
                given = with_placeholders(inputs, needed, ctx.layouts, ctx.geometry, ctx.dtype)
                gradients = convolution_gradients(gradient, *given, ctx.geometry, part)
                found = [old if new is None else new for old, new in zip(found, gradients, strict=True)]
                del given, gradients
        if ctx.by_position:
            stride, padding, dilation, _ = ctx.geometry
            kernel = tuple(ctx.layouts[1].size[2:])
            found[1] = conv_weight_gradient(gradient, inputs, kernel, stride, padding, dilation)
        if to_bias and not mask[2]:  # oneDNN would compute the weight's gradient on the way
            found[2] = gradient.sum((0, 2, 3))
        return (*found, None, None, None, None)


def _separated(mask: list[bool]) -> list[list[bool]]:
    """The input's gradient, then the others: a converted weight is freed before its gradient is made."""
    return [[mask[0], False, False], [False, *mask[1:]]]


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

    def filled(fill: Callable[[Layout], Tensor]) -> tuple[Tensor, Tensor]:
        return fill(of_inputs) if inputs is None else inputs, fill(of_weight) if weight is None else weight

    pair = filled(Layout.placeholder)
    if pair[0].is_meta:
        return pair
    stride, padding, dilation, groups = (list(each) if isinstance(each, tuple) else each for each in geometry)
    backend = torch._C._select_conv_backend(*pair, None, stride, padding, dilation, False, [0, 0], groups, None)
    if _needs_memory(*pair, geometry, backend):
        return filled(Layout.empty)
    order = torch._C._conv_determine_backend_memory_format(*pair, backend)
    return filled(lambda layout: layout.ordered(order).placeholder())


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


def conv_weight_gradient(
    gradient: Tensor, inputs: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """The gradient of a weight, (K, C, kh, kw) in channels_last, one matrix product per kernel position.

    For a convolution of (B, C, H, W) to (B, K, H', W') with zero padding and one group. On feature maps of a few pixels
    oneDNN takes a multiple of the time, and a workspace of four to eight times the weights. Here nothing is computed
    for padding (more than half of the work on 2x2 pixels), and no patches are unfolded.
    """
    channels, filters = inputs.shape[1], gradient.shape[1]
    outputs, pixels = gradient.permute(0, 2, 3, 1), inputs.permute(0, 2, 3, 1)
    total = gradient.new_zeros(filters, *kernel, channels)
    copied = outputs[0].numel() + pixels[0].numel()
    images = max(1, max(total.numel(), COPIED_VALUES) // copied)  # a tap copies the pixels that it touches
    taps = [
        [_touched(tap, *sizes) for tap in range(taps)]
        for taps, sizes in zip(
            kernel, zip(inputs.shape[2:], gradient.shape[2:], stride, padding, dilation, strict=True), strict=True
        )
    ]
    for start in range(0, len(inputs), images):
        rows, columns = outputs[start : start + images], pixels[start : start + images]
        for i, (out_y, in_y) in enumerate(taps[0]):
            for j, (out_x, in_x) in enumerate(taps[1]):
                left = rows[:, out_y, out_x].reshape(-1, filters)
                total[:, i, j].addmm_(left.t(), columns[:, in_y, in_x].reshape(-1, channels))
    return total.permute(0, 3, 1, 2)


def _touched(tap: int, size: int, outputs: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice]:
    """Along one axis, the outputs for which a tap lies inside the image, and the inputs that it then reads."""
    offset = tap * dilation - padding
    first = max(0, -(offset // stride))
    last = min(outputs, (size - 1 - offset) // stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    return slice(first, last), slice(first * stride + offset, (last - 1) * stride + offset + 1, stride)


class _Padded(torch.autograd.Function):
    """Padding that keeps no feature map (B, C, H, W), of which the gradient needs the shape alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, frame: Frame, mode: str) -> Tensor:
        ctx.size, ctx.frame, ctx.mode = inputs.shape, frame, mode
        return F.pad(inputs, frame, mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        left, right, above, below = ctx.frame
        gradient = _folded(gradient, 2, ctx.size[2], above, below, ctx.mode)
        return _folded(gradient, 3, ctx.size[3], left, right, ctx.mode), None, None


def _folded(gradient: Tensor, dimension: int, size: int, before: int, after: int, mode: str) -> Tensor:
    """Add the gradient of the padding along a dimension of (B, C, H, W) to the pixels that it was copied from."""
    sources = F.pad(torch.arange(size, dtype=torch.float64).view(1, 1, size), (before, after), mode).view(-1)
    sources = sources.to(gradient.device, torch.int64)
    folded = gradient.narrow(dimension, before, size).clone()
    for start, length in ((0, before), (before + size, after)):
        folded.index_add_(dimension, sources[start : start + length], gradient.narrow(dimension, start, length))
    return folded


def pad(inputs: Tensor, frame: Frame, mode: str) -> Tensor:
    """``F.pad`` of (B, C, H, W) to (B, C, H + above + below, W + left + right), in a mode of convolutions."""
    if mode == "constant":  # torch's own keeps nothing either
        return F.pad(inputs, frame)
    padded: Tensor = _Padded.apply(inputs, frame, mode)
    return padded


class LeanConv2d(nn.Conv2d):
    """``nn.Conv2d`` that keeps only what the requested gradients need; the state dict is the same."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = autocast_dtype(input)
        by_position = weight.requires_grad and dtype is None and self._is_small(input)
        converts = dtype is None and weight.dtype == torch.bfloat16 != input.dtype
        dtype = input.dtype if converts else dtype
        if not needs_gradient(input, weight, bias) or not (by_position or converts or _is_lean(input, weight, dtype)):
            stock: Tensor = super()._conv_forward(input, weight.to(input.dtype) if converts else weight, bias)
            return stock
        images, geometry = self._prepared(input, dtype)
        output: Tensor = _LeanConvolution.apply(images, weight, bias, geometry, by_position, dtype, True)
        return output.squeeze(0) if input.dim() == 3 else output

    def _prepared(self, input: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Geometry]:
        """The input as (B, C, H, W), padded and in the precision of autocast, and the geometry that remains."""
        images = input if dtype is None else input.to(dtype)
        images = images.unsqueeze(0) if input.dim() == 3 else images
        frame, mode, padding = self._frame()
        with no_autocast(images, dtype):  # on a CPU it would pad in single precision
            images = pad(images, frame, mode) if any(frame) else images
        return images, Geometry(self.stride, padding, self.dilation, self.groups)

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
        if self.padding_mode != "zeros" or isinstance(self.padding, str) or inputs.dim() != 4:
            return False
        geometry = Geometry(self.stride, self.padding, self.dilation, self.groups)
        return _has_small_output(inputs, self.kernel_size, geometry)


def _has_small_output(inputs: Tensor, kernel: Pair, geometry: Geometry) -> bool:
    """Whether inputs (B, C, H, W) on a processor give outputs of at most :data:`SMALL_MAP` pixels, in one group."""
    if geometry.groups > 1 or inputs.device.type == "cuda":
        return False
    return math.prod(output_size(inputs.shape[2:], kernel, geometry)) <= SMALL_MAP


def convolution_for_backward(layer: nn.Conv2d, inputs: Tensor, padding: Pair) -> Tensor:
    """A convolution of (B, C, H, W) of which only gradients are wanted; its output (B, K, H', W') has no values.

    ``padding`` are zeros, in place of the layer's own, for inputs that are padded already.
    """
    dtype, geometry = autocast_dtype(inputs), Geometry(layer.stride, padding, layer.dilation, layer.groups)
    images = inputs if dtype is None else inputs.to(dtype)
    trained = layer.weight.requires_grad and dtype is None
    by_position = trained and isinstance(layer, LeanConv2d) and _has_small_output(inputs, layer.kernel_size, geometry)
    found: Tensor = _LeanConvolution.apply(images, layer.weight, layer.bias, geometry, by_position, dtype, False)
    return found


def output_size(size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> list[int]:
    """Rows and columns of a convolution's output, from those of its input and kernel."""
    sizes = zip(size, kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    return [(pixels + 2 * padded - apart * (taps - 1) - 1) // step + 1 for pixels, taps, step, padded, apart in sizes]


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

    Every filter is scaled to mean 0 and standard deviation 1 (Qiao et al., "Weight standardization", equation 5; the
    side modules of Rep-Net). Stock autograd keeps three to four copies of every weight for that; here the standardised
    weight is recomputed in the backward pass. The state dict holds the trained weight. A filter needs two values.
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
    """The device whose autocast state applies to a tensor of any shape; the meta device stands for a CPU."""
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
