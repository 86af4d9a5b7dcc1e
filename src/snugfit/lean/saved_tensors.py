"""What an operator must save for its backward pass, and what it may overwrite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from snugfit._upstream import has_global_hooks

_NAME = "may_overwrite"
"""Name of the layer's attribute; it is copied with the layer, but not part of the state dict."""


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a backward pass through these tensors, of any shapes, is possible; otherwise torch's operators are used.

    They are also used under torch.compile, which decides itself what to keep.
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
    """A view (N,) of a tensor of any shape in memory order; None if its elements are not one block of memory."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    if not tensor.permute(by_stride).is_contiguous():
        return None
    return tensor.as_strided((tensor.numel(),), (1,))


class InplacePermissions(NamedTuple):
    """What a layer may overwrite: a feature map that it alone reads, and an unshared gradient.

    Attributes:
        input: the feature map that it reads.
        gradient: the incoming gradient.
        hooks: of the layer and its neighbours, by kind; while there is any, nothing is overwritten, because hooks may
            keep their arguments. (Not the layers themselves, because then a copy of one layer would copy all of them.)
    """

    input: bool = False
    gradient: bool = False
    hooks: tuple[dict[int, Any], ...] = ()


_NONE = InplacePermissions()


class Overwriting(nn.Module):
    """A layer whose description has its permissions, which distinguish it from layers that compute the same."""

    def extra_repr(self) -> str:
        """Torch's description, and what may be overwritten."""
        permissions: InplacePermissions = self.__dict__.get(_NAME, _NONE)
        permitted = (("input", permissions.input), ("gradient", permissions.gradient))
        marks = [f"overwrites={name}" for name, on in permitted if on]
        return ", ".join(filter(None, (super().extra_repr(), *marks)))


def permissions_of(layer: nn.Module) -> InplacePermissions:
    """What a layer may overwrite in this call; nothing under torch.compile, which decides itself."""
    permissions: InplacePermissions = layer.__dict__.get(_NAME, _NONE)
    if torch.compiler.is_compiling() or any(permissions.hooks) or has_global_hooks():
        return _NONE
    return permissions


def allow_inplace(layer: nn.Module, *, gradient: bool, neighbours: Iterable[nn.Module]) -> None:
    """Let a layer overwrite its input (and its gradient) while neither it nor its neighbours have hooks."""
    hooks = tuple(
        kind
        for each in (layer, *neighbours)
        for kind in (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks)
    )
    layer.__dict__[_NAME] = InplacePermissions(True, gradient, hooks)


def forbid_inplace(layer: nn.Module) -> None:
    """Remove a layer's permissions; its own ``inplace`` still applies."""
    layer.__dict__.pop(_NAME, None)
