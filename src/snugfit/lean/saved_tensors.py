"""When an operator has to save anything, and stand-ins for tensors of which a gradient needs the shape alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a backward pass through these tensors can come; where none can, torch's own operators do as well.

    A compiler sees torch's own operators too: it decides itself what to keep, and cannot look into ours.
    """
    wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return wanted and not torch.compiler.is_compiling()


class Layout(NamedTuple):
    """All of a tensor but its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of a tensor; where its elements share memory (expanded, unfolded), that of a copy of it."""
        strides = tensor.stride() if _apart(tensor) else torch.empty_like(tensor, device="meta").stride()
        return cls(tensor.shape, strides, tensor.dtype, tensor.device)

    def ordered(self, order: torch.memory_format) -> Layout:
        """The same in another memory format: a kernel that converts its inputs to it then finds nothing to copy."""
        like = torch.empty(self.size, device="meta", memory_format=order)
        return self._replace(stride=like.stride())

    def empty(self) -> Tensor:
        """A new tensor of this layout."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def stand_in(self) -> Tensor:
        """A tensor of this layout without memory, for kernels that read its shape and strides alone.

        Its memory is given back before it was touched, and never counted as a new tensor's. An expanded scalar would
        not do: kernels ask for it to be contiguous, which copies it. Reading its values is an error, printing included.
        """
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        storage = tensor.untyped_storage()
        tensor.set_(storage, 0, self.size, self.stride)
        storage.resize_(0)
        return tensor


def _apart(tensor: Tensor) -> bool:
    """Whether no two elements of a tensor can share memory: every stride leaps over all that smaller ones reach."""
    reach = 0
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1:
            if stride <= reach:
                return False
            reach += stride * (count - 1)
    return True


def memory_order(tensor: Tensor) -> Tensor | None:
    """A view (N,) of a tensor's elements in the order of its memory; None where they do not fill a stretch of it."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    if not tensor.permute(by_stride).is_contiguous():
        return None
    return tensor.as_strided((tensor.numel(),), (1,))
