"""A network of several inputs as one that takes a single tensor, so that batches and probes need to know no other."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn

from snugfit._core.inputs import Input, InputDtype


def unpacked(
    packed: Tensor, first: int, shape: tuple[int, ...], dtype: InputDtype, name: str, place: int = 0
) -> Tensor:
    """An input (B, *shape) of its type, contiguous as a loader makes it, from the values (B, 1, 1, N) of all.

    Values of synthetic batches are no integers; they count as 0, which is a valid index. ``first`` is the number of
    values before it, ``name`` its keyword, if it has one, and ``place`` its place among them in the forward pass.
    """
    part = packed.flatten(1)[:, first : first + math.prod(shape)]
    shaped = part.reshape(len(part), *shape)
    if dtype == "float32":
        return shaped.contiguous()
    kind: torch.dtype = getattr(torch, dtype)
    return shaped.to(kind) if kind == torch.bool else (shaped * (shaped == shaped.trunc())).to(kind)


def _places(inputs: Sequence[Input]) -> list[tuple[int, tuple[int, ...], InputDtype, str]]:
    """Where :func:`unpacked` finds each input."""
    starts = accumulate((each.values for each in inputs), initial=0)
    return [(first, each.shape, each.dtype, each.name) for first, each in zip(starts, inputs, strict=False)]


@dataclass(frozen=True)
class _Unpack:
    """A forward pre-hook that makes the inputs of a forward pass from their values (B, 1, 1, N)."""

    inputs: tuple[Input, ...]

    def __call__(self, module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        pairs = [(place[-1], unpacked(args[0], *place)) for place in _places(self.inputs)]
        return tuple(value for name, value in pairs if not name), {name: value for name, value in pairs if name}


def pack_inputs(graph: fx.Graph, inputs: Sequence[Input], placeholders: Sequence[fx.Node]) -> None:
    """Replace the placeholders of inputs in a graph by one, of their values (B, 1, 1, N); in place."""
    with graph.inserting_before(next(iter(graph.nodes))):
        last = packed = graph.placeholder("packed")
    order = [node for node in graph.nodes if node in placeholders]
    for (first, shape, dtype, _), node in zip(_places(inputs), placeholders, strict=True):
        with graph.inserting_after(last):
            last = graph.call_function(unpacked, (packed, first, shape, dtype, str(node.target), order.index(node)))
        node.replace_all_uses_with(last)
        graph.erase_node(node)


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
    """Let a module that takes the values of its inputs as one tensor take them as its model does; in place."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _Unpack):
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
    if not isinstance(module, fx.GraphModule):
        return
    packed = next(iter(module.graph.nodes))
    parts = sorted((node for node in packed.users if node.target is unpacked), key=lambda node: int(str(node.args[-1])))
    for node in parts:
        with module.graph.inserting_before(packed):
            node.replace_all_uses_with(module.graph.placeholder(str(node.args[-2])))
        module.graph.erase_node(node)
    if parts:
        module.graph.erase_node(packed)
        module.recompile()
