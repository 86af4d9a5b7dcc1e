"""What a layer may overwrite: a feature map that it alone reads, and an unshared gradient.

A layer cannot know this by itself: :mod:`snugfit.lean.fused_frozen_conv` derives it from the network's graph. Hooks
may keep their arguments, so tensors that a hook could have seen are never overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_NAME = "may_overwrite"
"""Name of the layer's attribute; it is copied with the layer, but not part of the state dict."""


class InplacePermissions(NamedTuple):
    """What a layer may overwrite.

    Attributes:
        input: the feature map that it reads.
        gradient: the incoming gradient.
        hooks: of the layer and its neighbours, by kind; while there is any, nothing is overwritten. (Not the layers
            themselves, because then a copy of one layer would copy all of them.)
    """

    input: bool = False
    gradient: bool = False
    hooks: tuple[dict[int, Any], ...] = ()


_NONE = InplacePermissions()


def permissions_of(layer: nn.Module) -> InplacePermissions:
    """What a layer may overwrite in this call; nothing under torch.compile, which decides itself."""
    if torch.compiler.is_compiling():
        return _NONE
    permissions: InplacePermissions = layer.__dict__.get(_NAME, _NONE)
    if any(permissions.hooks) or _has_any_global_hook():
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


def described(layer: nn.Module, description: str) -> str:
    """A layer's description with its permissions, which distinguish it from layers that compute the same."""
    permissions: InplacePermissions = layer.__dict__.get(_NAME, _NONE)
    permitted = (("input", permissions.input), ("gradient", permissions.gradient))
    marks = [f"overwrites={name}" for name, on in permitted if on]
    return ", ".join(filter(None, (description, *marks)))
