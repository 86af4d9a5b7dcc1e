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
"""The attribute of a layer; it is not in the state dict, and copied along."""


class Leave(NamedTuple):
    """Leave to overwrite.

    Attributes:
        input: the map that is read.
        gradient: the gradient that comes in.
        hooks: of the layer and its neighbours, by kind; while there is one, nothing is overwritten. (Not the layers
            themselves: a copy of one layer would be a copy of all.)
    """

    input: bool = False
    gradient: bool = False
    hooks: tuple[dict[int, Any], ...] = ()


_NONE = Leave()


def leave_of(layer: nn.Module) -> Leave:
    """What a layer may overwrite in this call; nothing where a compiler looks on, which decides itself."""
    if torch.compiler.is_compiling():
        return _NONE
    leave: Leave = layer.__dict__.get(_NAME, _NONE)
    if any(leave.hooks) or _has_any_global_hook():
        return _NONE
    return leave


def give_leave(layer: nn.Module, *, gradient: bool, neighbours: Iterable[nn.Module]) -> None:
    """Let a layer overwrite its input, and its gradient too if ``gradient``, while neither it nor these have hooks."""
    hooks = tuple(
        kind
        for each in (layer, *neighbours)
        for kind in (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks)
    )
    layer.__dict__[_NAME] = Leave(True, gradient, hooks)


def take_leave(layer: nn.Module) -> None:
    """Let a layer overwrite nothing but what its own ``inplace`` says."""
    layer.__dict__.pop(_NAME, None)


def told(layer: nn.Module, description: str) -> str:
    """A layer's description with what it may overwrite, which tells it from others that compute the same."""
    leave: Leave = layer.__dict__.get(_NAME, _NONE)
    marks = [f"overwrites={name}" for name, on in (("input", leave.input), ("gradient", leave.gradient)) if on]
    return ", ".join(filter(None, (description, *marks)))
