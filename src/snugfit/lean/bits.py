"""One bit per element of what an activation passes back: packed eight to a byte, and applied to a gradient.

A few hundred thousand elements are worked on at once, so that what is between one step and the next stays in the
processor's cache and no map of bytes is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

_CHUNK = {"cpu": 1 << 19}
_LARGE_CHUNK = 1 << 26
"""Elements worked on at once, divisible by 8; a graphics processor wants few and large kernels."""
Test = Callable[[Tensor], Tensor]


def _chunks(values: Tensor) -> Iterator[slice]:
    step = _CHUNK.get(values.device.type, _LARGE_CHUNK)
    return (slice(start, min(start + step, len(values))) for start in range(0, len(values), step))


def _bytes(elements: slice) -> slice:
    return slice(elements.start // 8, (elements.stop + 7) // 8)


def _is_memory(tensor: Tensor) -> bool:
    """Whether numpy can work on it: neither on another device nor a tensor without values."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def pack(values: Tensor, test: Test) -> Tensor:
    """Pack what a test says of each of ``values``, (N,).

    Args:
        values: a row in the order of memory.
        test: values to booleans of the same shape; it is given numpy arrays or tensors, and uses operators alone.

    Returns:
        Bytes, (ceil(N / 8),), the first element in the lowest bit.
    """
    packed = torch.empty((len(values) + 7) // 8, dtype=torch.uint8, device=values.device)
    for part in _chunks(values):
        packed[_bytes(part)] = _pack_part(values[part], test)
    return packed


def _pack_part(values: Tensor, test: Test) -> Tensor:
    if _is_memory(values):  # numpy's comparisons and packing are several times as fast as torch's
        single = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        passed = test(single.numpy())  # type: ignore[arg-type]
        return torch.from_numpy(np.packbits(passed, bitorder="little"))
    bits = torch.nn.functional.pad(test(values).to(torch.uint8), (0, -len(values) % 8)).view(-1, 8)
    return (bits << _places(values.device)).sum(1, dtype=torch.uint8)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def masked(gradient: Tensor, packed: Tensor, slope: float, out: Tensor) -> None:
    """Write to ``out`` the gradient where a bit is set, and ``slope`` times the gradient elsewhere.

    Where the slope is 0 what is written is 0, whatever the gradient, as in torch's own kernels.

    Args:
        gradient, out: rows of floats, (N,).
        packed: the bits, as :func:`pack` makes them.
        slope: factor where the bit is not set.
    """
    for part in _chunks(gradient):
        mask = _unpack_part(packed[_bytes(part)], part.stop - part.start, gradient.dtype)
        given = (gradient[part], mask)
        if slope:
            torch.ops.aten.leaky_relu_backward.grad_input(*given, slope, False, grad_input=out[part])
        else:
            torch.ops.aten.threshold_backward.grad_input(*given, 0, grad_input=out[part])


def _unpack_part(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Ones and zeros, (count,): vectorised kernels exist for floats only."""
    if _is_memory(packed):
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little")).to(dtype)
    return ((packed.unsqueeze(1) >> _places(packed.device)) & 1).view(-1)[:count].to(dtype)
