"""One bit per element for the gradient of an activation: packed eight to a byte, and applied to a gradient.

The work is done chunk by chunk, so that intermediate values stay in the processor's cache. An eighth of a chunk is a
plane, and a byte holds a bit of each of the eight planes: packing and unpacking are arithmetic on whole planes. Nothing
is allocated per chunk, because the kernel provides fresh memory more slowly than the arithmetic runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK = {"cpu": 1 << 18, "meta": 1 << 18}
LARGE_CHUNK = 1 << 26
"""Elements worked on at once.

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
    """Numpy for a tensor of any shape in the processor's memory.

    Its comparisons are several times as fast as torch's.
    """
    return np if type(tensor) is Tensor and tensor.device.type == "cpu" else torch


def _array(tensor: Tensor, library: Any) -> Any:
    return tensor.numpy() if library is np else tensor


def _bits(device: torch.device) -> Tensor:
    """One bit for each of the eight planes, (8, 1)."""
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device).view(8, 1)


def pack(values: Tensor, tests: Tests) -> Tensor:
    """Pack one bit per value: whether it passes the tests.

    Args:
        values: floats, (N,).
        tests: comparisons that all must hold.

    Returns:
        Bytes, (ceil(N / 8),).
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
    """Write to ``out`` the gradient where a bit is set, and ``slope`` times the gradient elsewhere.

    Where the slope is 0 the result is 0, whatever the gradient, as in torch's own kernels.

    Args:
        gradient, out: floats, (N,); they may be the same tensor, but must not overlap otherwise.
        packed: bits from :func:`pack`, (ceil(N / 8),).
        slope: factor where the bit is not set.
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
