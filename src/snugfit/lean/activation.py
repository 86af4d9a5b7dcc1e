"""ReLU, ReLU6 and LeakyReLU that keep one bit per element for their backward pass.

Torch's own keep a feature map of floats. Often the next layer keeps the same one, and it costs nothing. Where that
layer's weight is frozen, it is kept for its signs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.saved_tensors import Layout, Overwriting, memory_order, needs_gradient, permissions_of

CHUNK = {"cpu": 1 << 18, "meta": 1 << 18}
LARGE_CHUNK = 1 << 26
"""Elements worked on at once, so that intermediate values stay in the processor's cache.

A graphics processor needs few and large kernels. On the meta device, where only bytes are counted, one chunk takes as
much as all.
"""

Tests = tuple[tuple[str, float], ...]
"""Comparisons of the output that all hold where the gradient passes; torch and numpy share their names."""
RELU: Tests = (("not_equal", 0.0),)
"""Nothing is below 0 in a ReLU's output, and NaN passes its gradient as it does with torch's."""
RELU6: Tests = (("greater", 0.0), ("less", 6.0))
LEAKY_RELU: Tests = (("greater", 0.0),)


def _chunks(values: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of each chunk's elements and of its bytes, for values (N,)."""
    step = CHUNK.get(values.device.type, LARGE_CHUNK)
    for start in range(0, step if values.is_meta else values.numel(), step):
        stop = min(start + step, values.numel())
        yield slice(start, stop), slice(start // 8, (stop + 7) // 8)


def _scratch(values: Tensor, copies: int, dtype: torch.dtype) -> Tensor:
    """Scratch memory (copies, 8 planes of the longest chunk) for values (N,)."""
    longest = min(values.numel(), CHUNK.get(values.device.type, LARGE_CHUNK))
    return torch.empty(copies, (longest + 7) // 8 * 8, dtype=dtype, device=values.device)


def _library(tensor: Tensor) -> Any:
    """Numpy for a tensor of any shape in the processor's memory: its comparisons are several times as fast."""
    return np if type(tensor) is Tensor and tensor.device.type == "cpu" else torch


def _array(tensor: Tensor, library: Any) -> Any:
    return tensor.numpy() if library is np else tensor


def _bits(device: torch.device) -> Tensor:
    """One bit for each of the eight planes, (8, 1)."""
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device).view(8, 1)


def pack(values: Tensor, tests: Tests) -> Tensor:
    """Pack one bit per value of floats (N,), whether it passes all tests, into bytes (ceil(N / 8),).

    An eighth of a chunk is a plane, and a byte holds a bit of each of the eight planes: packing and unpacking are
    arithmetic on whole planes. Nothing is allocated per chunk: fresh memory comes more slowly than the arithmetic runs.
    """
    library = _library(values)
    packed = torch.empty((values.numel() + 7) // 8, dtype=torch.uint8, device=values.device)
    scratch, bits = _scratch(values, len(tests), torch.bool), _array(_bits(values.device), library)
    target, passed = _array(packed, library), _array(scratch, library)
    for part, place in _chunks(values):
        chunk, width = values[part], place.stop - place.start
        if library is np and chunk.dtype in (torch.bfloat16, torch.float16):
            chunk = chunk.float()
        passed[0, chunk.numel() : 8 * width] = False
        _test(_array(chunk, library), tests, passed[:, : chunk.numel()], library)
        planes = _array(scratch[0, : 8 * width].view(torch.uint8).view(8, width), library)
        library.multiply(planes, bits, out=planes)
        library.sum(planes, 0, dtype=target.dtype, out=target[place])
    return packed


def _test(values: Any, tests: Tests, passed: Any, library: Any) -> None:
    """Write to ``passed[0]`` whether all tests hold; the other rows are scratch."""
    for (name, bound), row in zip(tests, passed, strict=True):
        getattr(library, name)(values, bound, out=row)
    for row in passed[1:]:
        library.logical_and(passed[0], row, out=passed[0])


def masked(gradient: Tensor, packed: Tensor, slope: float, out: Tensor) -> None:
    """Write to ``out`` the gradient (N,) where a bit is set, and ``slope`` times the gradient elsewhere.

    Where the slope is 0 the result is 0, whatever the gradient, as in torch's own kernels. ``out`` may be the gradient,
    but must not overlap it otherwise. ``packed`` comes from :func:`pack`, (ceil(N / 8),).
    """
    library = _library(packed)
    (scratch,) = _scratch(gradient, 1, torch.uint8)
    bits, source, planes = (_array(each, library) for each in (_bits(packed.device), packed, scratch))
    for part, place in _chunks(gradient):
        chunk, width = gradient[part], place.stop - place.start
        library.bitwise_and(source[place], bits, out=planes[: 8 * width].reshape(8, width))
        if out is not gradient:  # vectorised kernels exist for floats only
            _pass(chunk, out[part].copy_(scratch[: chunk.numel()]), slope, out[part])
            continue
        for plane, own in zip(torch.split(scratch[: chunk.numel()], width), torch.split(chunk, width), strict=True):
            _pass(own, plane.to(own.dtype), slope, own)


def _pass(gradient: Tensor, mask: Tensor, slope: float, out: Tensor) -> None:
    """Write the gradient where the mask is not 0, and ``slope`` times the gradient elsewhere; all (N,)."""
    if slope:
        torch.ops.aten.leaky_relu_backward.grad_input(gradient, mask, slope, False, grad_input=out)
    else:
        torch.ops.aten.threshold_backward.grad_input(gradient, mask, 0, grad_input=out)


Forward = Callable[[Tensor, bool], Tensor]
"""The activation of a feature map (B, C, ...), in place or not."""


class _Activation(torch.autograd.Function):
    """An activation (B, C, ...) whose gradient follows from its output, so that it may overwrite its input."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, forward: Forward, in_place: bool, overwrites: bool, tests: Tests, slope: float
    ) -> Tensor:
        output = forward(inputs, in_place)
        if output is inputs:
            ctx.mark_dirty(inputs)
        row = memory_order(output.detach())
        assert row is not None, "a new feature map fills its memory, and no other is overwritten"
        ctx.save_for_backward(pack(row, tests))
        ctx.layout, ctx.slope, ctx.overwrites = Layout.of(output), slope, overwrites
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        in_order = gradient.stride() == ctx.layout.stride
        given = memory_order(gradient) if in_order else None
        if ctx.overwrites and given is not None:
            masked(given, packed, ctx.slope, given)
            return gradient, *(None,) * 5
        passed = ctx.layout.empty()
        out = memory_order(passed)
        assert out is not None
        if given is None:  # the bits are in the order of the output's memory
            given = out
            passed.copy_(gradient)
        masked(given, packed, ctx.slope, out)
        return passed, *(None,) * 5


class _Lean(Overwriting):
    inplace: bool

    def _activate(self, inputs: Tensor, forward: Forward, tests: Tests, slope: float = 0.0) -> Tensor:
        permissions = permissions_of(self)
        filled = memory_order(inputs) is not None
        in_place = self.inplace or (permissions.input and filled and not inputs._is_view())
        if not needs_gradient(inputs) or (in_place and not filled):
            return forward(inputs, in_place)
        output: Tensor = _Activation.apply(inputs, forward, in_place, permissions.gradient, tests, slope)
        return output


class LeanReLU(_Lean, nn.ReLU):
    """``nn.ReLU`` that keeps a bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        """Feature map of any shape to one of the same shape; NaN passes its gradient, as in torch."""
        return self._activate(input, F.relu, RELU)


class LeanReLU6(_Lean, nn.ReLU6):
    """``nn.ReLU6`` that keeps a bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        """Feature map of any shape to one of the same shape; NaN has gradient 0, as in torch's vectorised kernel."""
        return self._activate(input, lambda values, in_place: F.hardtanh(values, 0.0, 6.0, in_place), RELU6)


class LeanLeakyReLU(_Lean, nn.LeakyReLU):
    """``nn.LeakyReLU`` that keeps a bit per element; torch's own for negative slopes, which hide the input's sign."""

    def forward(self, input: Tensor) -> Tensor:
        """Feature map of any shape to one of the same shape."""
        slope = self.negative_slope
        if slope < 0:
            return nn.LeakyReLU.forward(self, input)
        return self._activate(input, lambda values, in_place: F.leaky_relu(values, slope, in_place), LEAKY_RELU, slope)
