"""Whether an operator has to save anything, and placeholders for tensors of which a gradient needs the shape alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a backward pass through these tensors, of any shapes, is possible; otherwise torch's operators are used.

    Under torch.compile torch's operators are used too: the compiler decides itself what to keep, and cannot look into
    ours.
    """
    wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return wanted and not torch.compiler.is_compiling()


class Layout(NamedTuple):
    """Shape, strides, type and device of a tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of a tensor of any shape; if its elements share memory (expanded, unfolded), that of a copy."""
        strides = tensor.stride() if _apart(tensor) else torch.empty_like(tensor, device="meta").stride()
        return cls(tensor.shape, strides, tensor.dtype, tensor.device)

    def ordered(self, order: torch.memory_format) -> Layout:
        """The layout in another memory format, so that a kernel that converts its inputs to it copies nothing."""
        like = torch.empty(self.size, device="meta", memory_format=order)
        return self._replace(stride=like.stride())

    def empty(self) -> Tensor:
        """A new tensor of this shape and layout."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def placeholder(self) -> Tensor:
        """A tensor of this shape and layout without memory, for kernels that read only shape and strides.

        Its memory is freed before it is touched, and not counted as a new tensor's. An expanded scalar does not work:
        kernels make it contiguous, which copies it. Reading its values is an error, including printing.
        """
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        storage = tensor.untyped_storage()
        tensor.set_(storage, 0, self.size, self.stride)
        storage.resize_(0)
        return tensor


def _apart(tensor: Tensor) -> bool:
    """Whether no two elements of a tensor of any shape share memory: every stride exceeds the reach of smaller ones."""
    reach = 0
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1:
            if stride <= reach:
                return False
            reach += stride * (count - 1)
    return True


def memory_order(tensor: Tensor) -> Tensor | None:
    """A view (N,) of the elements of a tensor of any shape in memory order.

    None if they are not one block of memory.
    """
    by_stride = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    if not tensor.permute(by_stride).is_contiguous():
        return None
    return tensor.as_strided((tensor.numel(),), (1,))
