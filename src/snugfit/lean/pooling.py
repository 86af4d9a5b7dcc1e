"""Pooling that keeps next to nothing for its backward pass.

Torch's poolings save their input, of which the gradient needs the shape alone; max pooling also saves the position of
each maximum in the whole feature map, in eight bytes. Where windows do not overlap, the backward passes of torch's
average pooling take longer than the convolution before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.lean.saved_tensors import Layout, memory_order, needs_gradient

CHUNK = {"cpu": 1 << 17}
LARGE_CHUNK = 1 << 26
"""Input elements whose outputs' positions are held in eight bytes at once, or those of one image if it has more."""

Pair = tuple[int, int]


class _Window(NamedTuple):
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool


class _Places:
    """Conversion between torch's position of a maximum in the feature map and its position in the window.

    The position in the feature map is that of the window's first element, which may lie in the padding, plus an offset.
    """

    def __init__(self, window: _Window, width: int, outputs: torch.Size, device: torch.device) -> None:
        def line(count: int, step: int, start: int = 0) -> Tensor:
            return torch.arange(count, device=device) * step + start

        (rows, columns), stride, padding, dilation, _ = window
        top, left = line(outputs[-2], stride[0], -padding[0]), line(outputs[-1], stride[1], -padding[1])
        self.first = top[:, None] * width + left
        down, across = line(rows, dilation[0] * width), line(columns, dilation[1])
        self.offsets = (down[:, None] + across).view(-1)
        self.dtype = _smallest(rows * columns)
        self.taps = torch.zeros((rows - 1) * dilation[0] * width + (columns - 1) * dilation[1] + 1, dtype=self.dtype)
        self.taps = self.taps.to(device)
        self.taps[self.offsets] = torch.arange(rows * columns, device=device).to(self.dtype)

    def to_taps(self, places: Tensor, out: Tensor) -> None:
        """Write the position in the window of each place to ``out``, both (B, C, H', W'); ``places`` is overwritten."""
        torch.index_select(self.taps, 0, _row(places.sub_(self.first)), out=_row(out))

    def to_places(self, taps: Tensor, indices: Tensor, out: Tensor) -> Tensor:
        """Invert :meth:`to_taps` on (B, C, H', W'); ``indices`` is scratch for the positions as 32-bit integers."""
        torch.index_select(self.offsets, 0, _row(indices.copy_(taps)), out=_row(out))
        return out.add_(self.first)


def _smallest(count: int) -> torch.dtype:
    """The smallest integer type for this many window positions."""
    return torch.uint8 if count <= 1 << 8 else torch.int16 if count <= 1 << 15 else torch.int32


def _row(tensor: Tensor) -> Tensor:
    row = memory_order(tensor)
    assert row is not None, "a slice of a new feature map fills its memory"
    return row


def _parts(size: torch.Size, device: torch.device) -> Iterator[slice]:
    """Slices of a few images each; one empty slice if there are none."""
    step = max(1, CHUNK.get(device.type, LARGE_CHUNK) // max(1, size[1:].numel()))
    return (slice(start, min(start + step, size[0])) for start in range(0, max(1, size[0]), step))


class _LeanMaxPool(torch.autograd.Function):
    """Feature map (B, C, H, W) to (B, C, H', W'), a few images at a time."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, window: _Window) -> Tensor:
        ctx.layout, ctx.window = Layout.of(inputs), window
        pooled = _pooled(inputs, window).empty()
        places = _Places(window, inputs.shape[3], pooled.shape, inputs.device)
        taps = torch.empty_like(pooled, dtype=places.dtype)
        scratch: Tensor | None = None
        for part in _parts(inputs.shape, inputs.device):
            scratch = torch.empty_like(pooled[part], dtype=torch.int64) if scratch is None else scratch
            found = scratch[: len(pooled[part])]
            torch.ops.aten.max_pool2d_with_indices.out(inputs[part], *window, out=pooled[part], indices=found)
            places.to_taps(found, taps[part])
        ctx.save_for_backward(taps)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (taps,), window = ctx.saved_tensors, ctx.window
        passed = ctx.layout.empty()
        places = _Places(window, passed.shape[3], taps.shape, taps.device)
        scratch: list[Tensor] = []
        for part in _parts(passed.shape, passed.device):
            into, count = passed[part], part.stop - part.start
            scratch = scratch or [torch.empty_like(taps[part], dtype=kind) for kind in (torch.int32, torch.int64)]
            found = places.to_places(taps[part], scratch[0][:count], scratch[1][:count])
            backward = torch.ops.aten.max_pool2d_with_indices_backward.grad_input
            backward(gradient[part], into, *window, found, grad_input=into)
        return passed, None


def _pooled(inputs: Tensor, window: _Window) -> Layout:
    """Layout of torch's output (B, C, H', W') for inputs (B, C, H, W)."""
    values = torch.empty_strided(inputs.shape, inputs.stride(), dtype=inputs.dtype, device="meta")
    return Layout.of(F.max_pool2d(values, *window))._replace(device=inputs.device)


class LeanMaxPool2d(nn.MaxPool2d):
    """``nn.MaxPool2d`` that keeps a byte per output (two or four for windows of more than 256 elements)."""

    def forward(self, input: Tensor) -> Tensor:
        """Feature map (B, C, H, W) or (C, H, W) to (B, C, H', W') or (C, H', W')."""
        if self.return_indices or not needs_gradient(input) or input.dim() not in (3, 4):
            pooled: Tensor = super().forward(input)
            return pooled
        kernel, stride, padding, dilation = map(_pair, (self.kernel_size, self.stride, self.padding, self.dilation))
        window = _Window(kernel, stride, padding, dilation, self.ceil_mode)
        images = input if input.dim() == 4 else input.unsqueeze(0)
        pooled = _LeanMaxPool.apply(images, window)
        return pooled if input.dim() == 4 else pooled.squeeze(0)


def _pair(size: int | tuple[int, ...]) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


Pool = Callable[[Tensor], Tensor]


class _EvenPool(torch.autograd.Function):
    """Mean over windows that cover (..., H, W) once; the gradient is distributed evenly over each window.

    It has the memory format of the input, to which torch's would be copied.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, pool: Pool, window: Pair) -> Tensor:
        ctx.layout, ctx.window = Layout.of(inputs), window
        return pool(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        height, width = ctx.window
        rows, columns = gradient.shape[-2:]
        spread: Tensor = ctx.layout.empty()
        windows = spread.unflatten(-1, (columns, width)).unflatten(-3, (rows, height))
        share = gradient / (height * width)
        windows.copy_(share[..., :, None, :, None].expand_as(windows))
        return spread, None, None


def average_pool(features: Tensor, side: int) -> Tensor:
    """``F.adaptive_avg_pool2d(features, side)``: (B, C, H, W) to (B, C, side, side)."""
    height, width = features.shape[-2:]
    if height % side or width % side:
        return F.adaptive_avg_pool2d(features, side)
    window = (height // side, width // side)
    pooled: Tensor = _EvenPool.apply(features, lambda values: F.avg_pool2d(values, window), window)
    return pooled


class _ShapeOnly(torch.autograd.Function):
    """Any pooling of (B, C, H, W) whose gradient needs only its input's shape."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, pool: Pool, spread: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.layout, ctx.spread = Layout.of(inputs), spread
        return pool(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.spread(gradient, ctx.layout.placeholder()), None, None


class LeanAvgPool2d(nn.AvgPool2d):
    """``nn.AvgPool2d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Feature map (B, C, H, W) or (C, H, W) to (B, C, H', W') or (C, H', W')."""
        if not needs_gradient(input):
            return super().forward(input)
        sizes = [list(_pair(each)) for each in (self.kernel_size, self.stride, self.padding)]
        options = (self.ceil_mode, self.count_include_pad, self.divisor_override)

        def spread(gradient: Tensor, inputs: Tensor) -> Tensor:
            found: Tensor = torch.ops.aten.avg_pool2d_backward(gradient, inputs, *sizes, *options)
            return found

        pooled: Tensor = _ShapeOnly.apply(input, super().forward, spread)
        return pooled


class LeanAdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """``nn.AdaptiveAvgPool2d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Feature map (B, C, H, W) or (C, H, W) to (B, C, H', W') or (C, H', W')."""
        if not needs_gradient(input):
            return super().forward(input)
        if self.output_size in (1, (1, 1)):
            single: Tensor = _EvenPool.apply(input, super().forward, tuple(input.shape[-2:]))
            return single
        spread = torch.ops.aten._adaptive_avg_pool2d_backward
        pooled: Tensor = _ShapeOnly.apply(input, super().forward, spread)
        return pooled
