"""Convolutions on feature maps of a few pixels, by one matrix product for each position of the kernel.

On such maps oneDNN multiplies by the padding, which is more than half of the work on 2x2 pixels; it copies the weight
into an order of its own, which takes longer than the products of few images; and its workspace for the weight's
gradient is four to eight times the weight. None of that is done here, and no patches are unfolded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from snugfit._upstream import depthwise_workspace
from snugfit.lean.update_rules import PART_MULTIPLE, values_in_memory

PART_VALUES = 1 << 19
"""Values of a weight's gradient in a part, where it is applied in parts, or a few more: 2 MiB."""
SMALL_MAP = 16
"""Up to this many output pixels the weight gradient is computed by kernel position; above, oneDNN is as good."""
COPIED_VALUES = 1 << 14
"""A pass copies at most as many values at once as the weight has, or this many if the weight has fewer, and at least
those of one image."""
LEAST_WEIGHTS = 1 << 16
"""With fewer weights a call of oneDNN takes less time than the many calls of products."""
PRODUCTS = 1 << 18
"""A pass over a depthwise convolution makes at most 1 MiB of products at once, and at least those of one image."""
PADDING_SHARE = 0.5
"""With fewer weights it pays where at least this share of the products would be by padding."""
MANY_WEIGHTS = 1 << 19
"""With at least so many weights it pays without any padding: oneDNN copies the weight into an order of its own at every
call. The rule is the same for all batch sizes, so that no pass takes memory that a step of fewer images does not
show."""
ONEDNN_PIXELS = 192
"""Products of at least so many pixels are made by oneDNN: MKL takes up to twice as long on an AMD EPYC, where it makes
no use of AVX-512. Fewer take less time by MKL."""
Pair = tuple[int, ...]
"""Rows and columns, as torch types them."""


Rectangle = tuple[slice, slice, slice]
"""All images, some rows and columns: an index of (B, rows, columns, channels)."""
_ALL = slice(None)


class Geometry(NamedTuple):
    """How a convolution's kernel moves over the feature map."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


class _Position(NamedTuple):
    """A position of the kernel, and the rows and columns of output and input that it connects."""

    row: int
    column: int
    outputs: Rectangle
    inputs: Rectangle


def output_size(size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> list[int]:
    """Rows and columns of a convolution's output, from those of its input and kernel."""
    sizes = zip(size, kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    return [(pixels + 2 * padded - apart * (taps - 1) - 1) // step + 1 for pixels, taps, step, padded, apart in sizes]


class Choice(NamedTuple):
    """What is computed by kernel position.

    Attributes:
        weight_gradient: the gradient of the weight.
        others: the output and the gradient of the input.
    """

    weight_gradient: bool
    others: bool


NOTHING = Choice(weight_gradient=False, others=False)


def choose(inputs: Tensor, weight: Tensor, geometry: Geometry) -> Choice:
    """What to compute by kernel position for inputs (B, C, H, W) and a weight (K, C, kh, kw).

    Nothing on a GPU, or with more than :data:`SMALL_MAP` output pixels, and nothing that torch refuses. With groups,
    only the gradient of a depthwise weight, where oneDNN is slow. Nothing of a 1x1 kernel of fewer than
    :data:`MANY_WEIGHTS` whose product oneDNN would make anyway.
    """
    if inputs.device.type == "cuda":
        return NOTHING
    size = output_size(inputs.shape[2:], weight.shape[2:], geometry)
    if min(size) < 1 or math.prod(size) > SMALL_MAP:
        return NOTHING
    if geometry.groups > 1:
        depthwise = geometry.groups == inputs.shape[1] == len(weight)
        return Choice(depthwise and depthwise_workspace(inputs, weight) > 0, others=False)
    pixels = len(inputs) * math.prod(size)
    single = math.prod(weight.shape[2:]) == 1 and weight.numel() < MANY_WEIGHTS
    if single and tuple(size) == tuple(inputs.shape[2:]) and _is_for_onednn(pixels, inputs):
        return NOTHING
    return Choice(weight_gradient=True, others=_is_faster(inputs, weight, size, geometry))


def _is_faster(inputs: Tensor, weight: Tensor, size: Sequence[int], geometry: Geometry) -> bool:
    """Whether :func:`convolve` and :func:`input_gradient` pay, for (B, C, H, W), (K, C, kh, kw) and an output size.

    It is false for channels that torch refuses, for weights that are not in channels_last, which products would copy,
    for those of another type, whose converted positions would leave holes in the heap, and under torch.compile.
    """
    if weight.numel() < LEAST_WEIGHTS or torch.compiler.is_compiling():
        return False
    if inputs.shape[1] != weight.shape[1] or inputs.dtype != weight.dtype:
        return False
    if not weight.is_contiguous(memory_format=torch.channels_last):
        return False
    if weight.numel() >= MANY_WEIGHTS:
        return True
    kernel = weight.shape[2:]
    touched = sum(_area(position.outputs) for position in _positions(inputs.shape[2:], size, kernel, geometry))
    return touched <= (1 - PADDING_SHARE) * math.prod(size) * math.prod(kernel)


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The convolution of (B, C, H, W) to (B, K, H', W') in channels_last, with zero padding and one group."""
    size = output_size(inputs.shape[2:], weight.shape[2:], geometry)
    outputs = inputs.new_zeros(len(inputs), *size, len(weight))
    if bias is not None:
        outputs += bias
    positions = _positions(inputs.shape[2:], size, weight.shape[2:], geometry)
    pixels = inputs.permute(0, 2, 3, 1)
    for images in _parts(pixels, outputs, weight.numel()):
        rows, columns = outputs[images], pixels[images]
        for row, column, written, read in positions:
            factors = weight[:, :, row, column]
            rows[written] += _product(columns[read], factors)
    return outputs.permute(0, 3, 1, 2)


def input_gradient(gradient: Tensor, weight: Tensor, size: Sequence[int], geometry: Geometry) -> Tensor:
    """The gradient of an input (B, C, H, W) of these rows and columns, in channels_last; see :func:`convolve`.

    The gradient of the output is (B, K, H', W'), and the weight (K, C, kh, kw).
    """
    total = gradient.new_zeros(len(gradient), *size, weight.shape[1])
    positions = _positions(size, gradient.shape[2:], weight.shape[2:], geometry)
    outputs = gradient.permute(0, 2, 3, 1)
    for images in _parts(outputs, total, weight.numel()):
        rows, columns = outputs[images], total[images]
        for row, column, read, written in positions:
            columns[written] += _product(rows[read], weight[:, :, row, column].t())
    return total.permute(0, 3, 1, 2)


def weight_gradient(gradient: Tensor, inputs: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    """The gradient of a weight (K, C, kh, kw), in channels_last; see :func:`convolve`.

    The gradient of the output is (B, K, H', W'), and the inputs are (B, C, H, W). With groups the weight is depthwise,
    (C, 1, kh, kw).
    """
    if geometry.groups > 1:
        return _depthwise_gradient(gradient, inputs, kernel, geometry)
    channels, filters = inputs.shape[1], gradient.shape[1]
    outputs, pixels = gradient.permute(0, 2, 3, 1), inputs.permute(0, 2, 3, 1)
    total = gradient.new_zeros(filters, *kernel, channels)
    positions = _positions(inputs.shape[2:], gradient.shape[2:], kernel, geometry)
    copies = any(not (_is_whole(each.outputs, outputs) and _is_whole(each.inputs, pixels)) for each in positions)
    for images in _parts(outputs, pixels, total.numel()) if copies else (_ALL,):
        rows, columns = outputs[images], pixels[images]
        for row, column, written, read in positions:
            _add_product(total[:, row, column], rows[written], columns[read])
    return total.permute(0, 3, 1, 2)


def _depthwise_gradient(gradient: Tensor, inputs: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    """The gradient of a weight (C, 1, kh, kw), from that of the output (B, C, H', W') and inputs (B, C, H, W)."""
    outputs, pixels = gradient.permute(0, 2, 3, 1), inputs.permute(0, 2, 3, 1)
    total = gradient.new_zeros(*kernel, inputs.shape[1])
    positions = _positions(inputs.shape[2:], gradient.shape[2:], kernel, geometry)
    for images in _parts(outputs, pixels, PRODUCTS):
        rows, columns = outputs[images], pixels[images]
        for row, column, written, read in positions:
            total[row, column] += (rows[written] * columns[read]).sum((0, 1, 2))
    return total.permute(2, 0, 1).contiguous().unsqueeze(1)


def weight_gradient_parts(
    gradient: Tensor, inputs: Tensor, kernel: Pair, geometry: Geometry
) -> Iterator[tuple[int, Tensor]]:
    """The gradient of a weight, some filters at a time; see :func:`weight_gradient`.

    On the meta device there is only the first part: none takes more memory.

    Yields:
        The number of the first value of a part in memory order, and its values (N,) in this order.
    """
    values = inputs.shape[1] * math.prod(kernel)
    least = PART_MULTIPLE // math.gcd(PART_MULTIPLE, values)
    filters = max(PART_VALUES // values // least, 1) * least
    for first in range(0, filters if gradient.is_meta else gradient.shape[1], filters):
        yield first * values, _values_of_filters(gradient[:, first : first + filters], inputs, kernel, geometry)


def _values_of_filters(gradient: Tensor, inputs: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    """The values (N,) of :func:`weight_gradient`; no other variable keeps them in memory."""
    return values_in_memory(weight_gradient(gradient, inputs, kernel, geometry))


def _positions(
    size: Sequence[int], outputs: Sequence[int], kernel: Sequence[int], geometry: Geometry
) -> Sequence[_Position]:
    """The positions of a kernel at which it reads any pixel inside of the feature map."""
    return _positions_of(tuple(size), tuple(outputs), tuple(kernel), geometry)


@functools.lru_cache(maxsize=256)
def _positions_of(size: Pair, outputs: Pair, kernel: Pair, geometry: Geometry) -> Sequence[_Position]:
    """See :func:`_positions`; to find them takes longer than to multiply small maps."""
    by_axis = [
        [_touched(tap, *sizes) for tap in range(taps)]
        for taps, sizes in zip(
            kernel,
            zip(size, outputs, geometry.stride, geometry.padding, geometry.dilation, strict=True),
            strict=True,
        )
    ]
    positions = [
        _Position(row, column, (_ALL, out_y, out_x), (_ALL, in_y, in_x))
        for row, (out_y, in_y) in enumerate(by_axis[0])
        for column, (out_x, in_x) in enumerate(by_axis[1])
    ]
    return tuple(position for position in positions if _area(position.outputs))


def _touched(tap: int, size: int, outputs: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice]:
    """Along one axis, the outputs for which a tap lies inside the image, and the inputs that it then reads."""
    offset = tap * dilation - padding
    first = max(0, -(offset // stride))
    last = min(outputs, (size - 1 - offset) // stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    return slice(first, last), slice(first * stride + offset, (last - 1) * stride + offset + 1, stride)


def _is_whole(rectangle: Rectangle, pixels: Tensor) -> bool:
    """Whether a rectangle has all pixels (B, rows, columns, C), which are contiguous, so that nothing is copied."""
    return pixels.is_contiguous() and pixels[rectangle].shape == pixels.shape


def _area(rectangle: Rectangle) -> int:
    return math.prod(len(range(*each.indices(SMALL_MAP))) for each in rectangle[1:])


def _parts(one: Tensor, other: Tensor, weights: int) -> Iterator[slice]:
    """Images, (B, rows, columns, channels) in both maps, of which pixels are copied at the same time."""
    if not len(one):
        return
    copied = one[0].numel() + other[0].numel()
    images = max(1, max(weights, COPIED_VALUES) // copied)  # a position copies the pixels that it touches
    yield from (slice(start, start + images) for start in range(0, len(one), images))


def _product(pixels: Tensor, factors: Tensor) -> Tensor:
    """Pixels (B, rows, columns, C) times factors (K, C): (B, rows, columns, K)."""
    if _is_for_onednn(math.prod(pixels.shape[:-1]), pixels):
        return functional.conv2d(pixels.permute(0, 3, 1, 2), factors[:, :, None, None]).permute(0, 2, 3, 1)
    return (pixels.reshape(-1, pixels.shape[-1]) @ factors.t()).view(*pixels.shape[:-1], len(factors))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add to (K, C) the product over all pixels of (B, rows, columns, K) and (B, rows, columns, C)."""
    if _is_for_onednn(math.prod(right.shape[:-1]), right):
        kernel = (*total.shape, 1, 1)
        total += conv2d_weight(right.permute(0, 3, 1, 2), kernel, left.permute(0, 3, 1, 2)).flatten(1)
        return
    total.addmm_(left.reshape(-1, len(total)).t(), right.reshape(-1, right.shape[-1]))


def _is_for_onednn(pixels: int, like: Tensor) -> bool:
    """Whether oneDNN makes a product of so many pixels like those of (B, ...), as a convolution by a kernel of 1x1."""
    if pixels < ONEDNN_PIXELS or like.device.type != "cpu":
        return False
    return like.dtype is torch.float32 and mkldnn.is_available()
