"""Convolution that keeps its input only for a weight that trains, and its weight only for an input that does.

Torch's own keeps both whatever is frozen, so that freezing saves no memory. Where everything trains there is nothing
to save, and it is torch's own but for the weight gradient on small maps (:mod:`snugfit.lean.conv_weight_grad`).
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.conv_weight_grad import SMALL_MAP, Pair, tapped_weight_gradient
from snugfit.lean.padding import Frame, pad
from snugfit.lean.saved_tensors import Layout, needs_gradient


class Geometry(NamedTuple):
    """How a convolution's kernel moves over the map."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


class _LeanConvolution(torch.autograd.Function):
    """Map (B, C, H, W) to (B, K, H', W').

    Under autocast, ``dtype`` is the low precision, in which the input is given. The weight is kept as it is, and
    lowered anew in the backward pass: a copy of every frozen weight would live from one pass to the other.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, tapped: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        to_inputs, to_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(inputs if to_weight else None, weight if to_inputs else None)
        ctx.layouts, ctx.geometry, ctx.tapped, ctx.dtype = (
            (Layout.of(inputs), Layout.of(weight)),
            geometry,
            tapped,
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
        mask = [to_inputs, to_weight and not ctx.tapped, to_bias and to_weight and not ctx.tapped]
        found: list[Tensor | None] = [None, None, None]
        if any(mask):
            given = with_stand_ins(inputs, weight, ctx.layouts, ctx.geometry, ctx.dtype)
            found[:] = gradients_of(gradient, *given, ctx.geometry, mask)
        if ctx.tapped:
            stride, padding, dilation, _ = ctx.geometry
            kernel = tuple(ctx.layouts[1].size[2:])
            found[1] = tapped_weight_gradient(gradient, inputs, kernel, stride, padding, dilation)
        if to_bias and not mask[2]:  # oneDNN would compute the weight's gradient on the way
            found[2] = gradient.sum((0, 2, 3))
        return (*found, None, None, None)


def gradients_of(
    gradient: Tensor, inputs: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias, those that ``mask`` asks for; of input and weight, one may be a stand-in."""
    stride, padding, dilation, groups = geometry
    found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        gradient, inputs, weight, [len(weight)], stride, padding, dilation, False, (0, 0), groups, mask
    )
    return tuple(each if wanted else None for each, wanted in zip(found, mask, strict=True))


def with_stand_ins(
    inputs: Tensor | None, weight: Tensor | None, layouts: tuple[Layout, Layout], geometry: Geometry,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Input and weight, and in the place of one that was not kept a tensor of its shape without memory."""
    of_inputs, of_weight = layouts
    if dtype is not None:
        of_weight = of_weight._replace(dtype=dtype)
        weight = None if weight is None else weight.to(dtype)
    stand_ins = (of_inputs.stand_in() if inputs is None else inputs, of_weight.stand_in() if weight is None else weight)
    if stand_ins[0].is_meta:
        return stand_ins
    backend = _backend(*stand_ins, geometry)
    if _needs_memory(*stand_ins, geometry, backend):
        return (of_inputs.empty() if inputs is None else inputs, of_weight.empty() if weight is None else weight)
    order = torch._C._conv_determine_backend_memory_format(*stand_ins, backend)
    return (
        of_inputs.ordered(order).stand_in() if inputs is None else inputs,
        of_weight.ordered(order).stand_in() if weight is None else weight,
    )


def _backend(inputs: Tensor, weight: Tensor, geometry: Geometry) -> Any:
    """The kernel that torch takes for these tensors."""
    stride, padding, dilation, groups = (list(each) if isinstance(each, tuple) else each for each in geometry)
    return torch._C._select_conv_backend(inputs, weight, None, stride, padding, dilation, False, [0, 0], groups, None)


def _needs_memory(inputs: Tensor, weight: Tensor, geometry: Geometry, backend: Any) -> bool:
    """Whether the kernel copies its input, or takes it apart, group by group or image by image, without reading it."""
    if not (_is_plain(inputs) and _is_plain(weight)):
        return True
    return (geometry.groups > 1 or max(geometry.dilation) > 1) and backend.name.startswith("Slow")


def _is_plain(tensor: Tensor) -> bool:
    """Whether (B, C, H, W) lies in one of the two memory formats, strides of dimensions of size 1 included.

    Kernels copy what does not, and additions make such maps of single samples.
    """
    _, channels, height, width = tensor.shape
    plane, sample = height * width, channels * height * width
    return tensor.stride() in ((sample, plane, width, 1), (sample, 1, width * channels, channels))


class LeanConv2d(nn.Conv2d):
    """``nn.Conv2d`` that keeps no more than the gradients that are asked for need; the state dict is the same."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = autocast_dtype(input)
        tapped = weight.requires_grad and dtype is None and self._is_small(input)
        if not needs_gradient(input, weight, bias) or not (tapped or _is_lean(input, weight, dtype)):
            stock: Tensor = super()._conv_forward(input, weight, bias)
            return stock
        images = input if dtype is None else input.to(dtype)
        if input.dim() == 3:
            images = images.unsqueeze(0)
        frame, mode, padding = self._frame()
        if any(frame):
            images = pad(images, frame, mode)
        geometry = Geometry(self.stride, padding, self.dilation, self.groups)  # type: ignore[arg-type]
        output: Tensor = _LeanConvolution.apply(images, weight, bias, geometry, tapped, dtype)
        return output.squeeze(0) if input.dim() == 3 else output

    def _frame(self) -> tuple[Frame, str, Pair]:
        """What to pad before the convolution, in which mode, and what the convolution pads with zeros on both sides."""
        if self.padding_mode != "zeros":
            return tuple(self._reversed_padding_repeated_twice), self.padding_mode, (0, 0)  # type: ignore[return-value]
        if not isinstance(self.padding, str):
            return (0, 0, 0, 0), "constant", self.padding  # type: ignore[return-value]
        if self.padding == "valid":
            return (0, 0, 0, 0), "constant", (0, 0)
        rows, columns = (
            dilation * (kernel - 1) for dilation, kernel in zip(self.dilation, self.kernel_size, strict=True)
        )
        return (0, columns % 2, 0, rows % 2), "constant", (rows // 2, columns // 2)

    def _is_small(self, inputs: Tensor) -> bool:
        """Whether the weight gradient is to be computed tap by tap."""
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
    """Lower no weight in this context; nothing where ``dtype`` says that there is no autocast.

    Autocast would remember a copy that it makes in an operator of ours, which has no graph, and hand it to others.
    """
    return contextlib.nullcontext() if dtype is None else torch.autocast(_state_device(inputs), enabled=False)


def autocast_dtype(inputs: Tensor) -> torch.dtype | None:
    """The precision that autocast lowers a convolution to, None outside of it."""
    kind = _state_device(inputs)
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _state_device(inputs: Tensor) -> str:
    """The device whose autocast state holds: the meta device has none, and what is looked at there runs elsewhere."""
    return "cpu" if inputs.is_meta else inputs.device.type


def _is_lean(inputs: Tensor, weight: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether there is anything to save: torch's own keeps input and weight, and under autocast lowered copies."""
    if dtype is not None and torch.float64 in (inputs.dtype, weight.dtype):
        return False  # autocast leaves doubles alone
    if inputs.dim() not in (3, 4):
        return False  # torch says best what is wrong
    return not weight.requires_grad or (dtype is not None and not inputs.requires_grad)
