"""A network of several inputs as one that takes a single tensor, so that batches and probes need to know no other."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snugfit._core.inputs import Input


@dataclass(frozen=True)
class _Unpack:
    """A forward pre-hook that makes the inputs of a forward pass from their values (B, 1, 1, N)."""

    inputs: tuple[Input, ...]

    def __call__(self, module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        rows = args[0].flatten(1)
        parts = rows.split([each.values for each in self.inputs], dim=1)
        values = [_value(part, each) for part, each in zip(parts, self.inputs, strict=True)]
        pairs = list(zip((each.name for each in self.inputs), values, strict=True))
        return tuple(value for name, value in pairs if not name), {name: value for name, value in pairs if name}


def _value(part: Tensor, given: Input) -> Tensor:
    """An input (B, ...) of its type, contiguous as a loader makes it, from its values (B, n).

    Values of synthetic batches are no integers; they count as 0, which is a valid index.
    """
    shaped = part.reshape(len(part), *given.shape)
    if given.dtype == "float32":
        return shaped.contiguous()
    kind: torch.dtype = getattr(torch, given.dtype)
    return shaped.to(kind) if kind == torch.bool else (shaped * (shaped == shaped.trunc())).to(kind)


def taking_one_tensor(model: nn.Module, inputs: Sequence[Input]) -> nn.Module:
    """A network that shares layers and weights with a model, and takes the values (B, 1, 1, N) of its inputs.

    The model itself is not changed; without ``inputs`` it is returned.
    """
    if not inputs:
        return model
    made = copy.copy(model)
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        setattr(made, name, OrderedDict(getattr(model, name)))
    made.register_forward_pre_hook(_Unpack(tuple(inputs)), prepend=True, with_kwargs=True)
    return made


def take_inputs(module: nn.Module) -> None:
    """Let a module of :func:`taking_one_tensor`, or a copy of it, take its inputs as the model does; in place."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _Unpack):
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
