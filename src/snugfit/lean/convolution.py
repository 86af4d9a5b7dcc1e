"""Convolutions that keep only what the requested gradients need.

Torch's own keeps input and weight whatever is frozen, so freezing saves no memory. Where everything is trained there is
nothing to save, and :class:`LeanConv2d` equals torch's own except on small feature maps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.by_position import (
    NOTHING,
    PART_VALUES,
    Choice,
    Geometry,
    Pair,
    choose,
    convolve,
    input_gradient,
    output_size,
    weight_gradient,
    weight_gradient_parts,
)
from snugfit.lean.saved_tensors import Layout, needs_gradient

EPS = 1e-5
"""Added to the standard deviation of a filter."""
_VALUES = (1, 2, 3)
"""Axes of the values of a filter, in weights (K, C, kh, kw)."""
Frame = tuple[int, ...]
"""Pixels added left, right, above and below."""


class PartialUpdate(Protocol):
    """Applies the gradient of a weight in parts, in the backward pass; whoever sets it must know that this is exact."""

    def serves(self, weight: Tensor) -> bool:
        """Whether it updates this weight (K, C, kh, kw); a copy of a layer has another one."""

    def __call__(self, parts: Iterable[tuple[int, Tensor]]) -> None:
        """Apply parts (N,), each with the number of its first value in memory order."""


class _Way(NamedTuple):
    """How a convolution is computed.

    Attributes:
        by_position: what is computed by kernel position.
        dtype: the type of the input, if the weight has another: the low precision of autocast, or float32 for a weight
            in bfloat16.
        computes: whether the output has values; otherwise it is a placeholder without memory.
        update: takes the weight's gradient in parts; autograd then gets none.
    """

    by_position: Choice
    dtype: torch.dtype | None
    computes: bool = True
    update: PartialUpdate | None = None


class _LeanConvolution(torch.autograd.Function):
    """Feature map (B, C, H, W) to (B, K, H', W').

    A weight in another type than the input's is converted again in the backward pass: copies of all weights would live
    from one pass to the other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        way: _Way,
    ) -> Tensor:
        to_inputs, to_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(inputs if to_weight else None, weight if to_inputs else None)
        ctx.layouts, ctx.geometry = (Layout.of(inputs), Layout.of(weight)), geometry
        ctx.way, dtype = way, way.dtype
        if not way.computes:
            size = output_size(inputs.shape[2:], weight.shape[2:], geometry)
            return inputs.new_empty(1, dtype=dtype).expand(len(inputs), len(weight), *size)
        if way.by_position.others:
            return convolve(inputs, weight, bias, geometry)
        if dtype is None:
            return F.conv2d(inputs, weight, bias, *geometry)
        with no_autocast(inputs, dtype):
            return F.conv2d(inputs, weight.to(dtype), None if bias is None else bias.to(dtype), *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        to_inputs, to_weight, to_bias = ctx.needs_input_grad[:3]
        by_position, dtype, _, update = ctx.way
        by_onednn = to_weight and not by_position.weight_gradient
        mask = [to_inputs and not by_position.others, by_onednn, to_bias and by_onednn]
        found: list[Tensor | None] = [None, None, None]
        if to_inputs and by_position.others:
            found[0] = input_gradient(gradient, weight, ctx.layouts[0].size[2:], ctx.geometry)
        for part in _separated(mask) if ctx.layouts[1].dtype == torch.bfloat16 else [mask]:
            if any(part):
                needed = weight if part[0] else None
                given = with_placeholders(inputs, needed, ctx.layouts, ctx.geometry, dtype)
                gradients = convolution_gradients(gradient, *given, ctx.geometry, part)
                found = [old if new is None else new for old, new in zip(found, gradients, strict=True)]
                del given, gradients
        if to_weight and by_position.weight_gradient:
            kernel = tuple(ctx.layouts[1].size[2:])
            if update is None:
                found[1] = weight_gradient(gradient, inputs, kernel, ctx.geometry)
            else:
                update(weight_gradient_parts(gradient, inputs, kernel, ctx.geometry))
        if to_bias and not mask[2]:  # oneDNN would compute the weight's gradient on the way
            found[2] = gradient.sum((0, 2, 3))
        return (*found, None, None)


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
    if inputs is not None and weight is not None:
        return inputs, weight

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
    """``nn.Conv2d`` that keeps only what the requested gradients need; the state dict is the same.

    Attributes:
        update: takes the gradient of a large weight in parts where it is computed by kernel position; None: autograd
            gets it, like all others.
        takes_parts: whether layers use their ``update``; see :func:`gradients_in_parts`.
    """

    update: PartialUpdate | None = None
    takes_parts: ClassVar[bool] = True

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = autocast_dtype(input)
        by_position = NOTHING if dtype is not None else self._by_position(input, weight)
        converts = dtype is None and weight.dtype == torch.bfloat16 != input.dtype
        dtype = input.dtype if converts else dtype
        small = by_position.others or (by_position.weight_gradient and weight.requires_grad)
        lean = small or converts or _is_lean(input, weight, dtype)
        if lean and needs_gradient(input, weight, bias):
            images, geometry = self._prepared(input, dtype)
            way = _Way(by_position, dtype, update=self._update_of(weight))
            output: Tensor = _LeanConvolution.apply(images, weight, bias, geometry, way)
            return output.squeeze(0) if input.dim() == 3 else output
        if by_position.others:
            return convolve(input, weight, bias, self._geometry)
        stock: Tensor = super()._conv_forward(input, weight.to(input.dtype) if converts else weight, bias)
        return stock

    @property
    def _geometry(self) -> Geometry:
        """Of a convolution with numeric zero padding."""
        assert not isinstance(self.padding, str)
        return Geometry(self.stride, self.padding, self.dilation, self.groups)

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

    def _update_of(self, weight: Tensor) -> PartialUpdate | None:
        """What takes the gradient of a weight (K, C, kh, kw) in parts, if there are several, in the weight's layout."""
        in_parts = (
            self.takes_parts
            and weight.numel() > PART_VALUES
            and self.groups == 1
            and weight.is_contiguous(memory_format=torch.channels_last)
        )
        return self.update if in_parts and self.update is not None and self.update.serves(weight) else None

    def _by_position(self, inputs: Tensor, weight: Tensor) -> Choice:
        """What to compute by kernel position for inputs (B, C, H, W) and a weight (K, C, kh, kw)."""
        if self.padding_mode != "zeros" or isinstance(self.padding, str) or inputs.dim() != 4:
            return NOTHING
        return choose(inputs, weight, self._geometry)


@contextlib.contextmanager
def gradients_in_parts(use: bool) -> Iterator[None]:
    """Context in which every :class:`LeanConv2d` uses its ``update``, or none does.

    With many images the gradient of a weight takes up to twice as long in parts, each of which copies the input again.
    """
    before, LeanConv2d.takes_parts = LeanConv2d.takes_parts, use
    try:
        yield
    finally:
        LeanConv2d.takes_parts = before


def convolution_for_backward(layer: nn.Conv2d, inputs: Tensor, padding: Pair) -> Tensor:
    """A convolution of (B, C, H, W) of which only gradients are wanted; its output (B, K, H', W') has no values.

    ``padding`` are zeros, in place of the layer's own, for inputs that are padded already.
    """
    dtype, geometry = autocast_dtype(inputs), Geometry(layer.stride, padding, layer.dilation, layer.groups)
    images = inputs if dtype is None else inputs.to(dtype)
    is_lean = isinstance(layer, LeanConv2d) and dtype is None
    by_position = choose(inputs, layer.weight, geometry) if is_lean else NOTHING
    way = _Way(by_position, dtype, computes=False)
    found: Tensor = _LeanConvolution.apply(images, layer.weight, layer.bias, geometry, way)
    return found


def standardise(weight: Tensor) -> Tensor:
    """Filters (K, C, kh, kw) minus their mean, divided by their unbiased standard deviation plus :data:`EPS`."""
    spread = weight.std(_VALUES, keepdim=True) + EPS
    return (weight - weight.mean(_VALUES, keepdim=True)).div_(spread)


def _through_standardising(gradient: Tensor, made: Tensor, weight: Tensor) -> Tensor:
    """The gradient of filters (K, C, kh, kw), in the memory of that of ``made``, what :func:`standardise` made of them.

    A constant filter has deviation 0, of which autograd takes the derivative as 0.
    """
    deviation = weight.std(_VALUES, keepdim=True)
    slope = (gradient * made).sum(_VALUES, keepdim=True) / (deviation * (weight[0].numel() - 1))
    gradient.sub_(gradient.mean(_VALUES, keepdim=True)).div_(deviation + EPS)
    return gradient.addcmul_(made, slope.masked_fill_(deviation == 0, 0), value=-1)


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
        made = standardise(weight)
        lowered = made.to(ctx.dtype or weight.dtype)
        given = with_placeholders(inputs, lowered, (ctx.layout, Layout.of(made)), ctx.geometry, None)
        to_inputs, to_made, _ = convolution_gradients(gradient, *given, ctx.geometry, mask)
        to_weight = None if to_made is None else _through_standardising(to_made.to(weight.dtype), made, weight)
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
