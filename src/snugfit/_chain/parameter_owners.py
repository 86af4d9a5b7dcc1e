"""Modules whose own tensors a unit reads without calling them, such as a class token or position embeddings.

A unit's graph keeps these tensors under their names, but the modules that they belong to, which know how to initialise
them, are not part of it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx, nn


def owners_of(unit: fx.GraphModule, model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` with a ``reset_parameters`` whose tensors a unit's graph reads directly, by name.

    They are copies on the meta device without sub-modules, so that they hold no weights in memory.
    """
    owners = {name: model.get_submodule(name) for name in sorted(_names(unit))}
    return {name: _emptied(owner) for name, owner in owners.items() if hasattr(owner, "reset_parameters")}


def reset_through(owner: nn.Module, holder: nn.Module) -> None:
    """Let ``owner`` initialise those of its own tensors that ``holder``, a part of a unit's module, has in memory."""
    parameters, buffers = owner._parameters, owner._buffers
    owner._parameters = {**parameters, **{k: v for k, v in holder._parameters.items() if k in parameters}}
    owner._buffers = {**buffers, **{k: v for k, v in holder._buffers.items() if k in buffers}}
    try:
        owner.reset_parameters()  # type: ignore[operator]
    finally:
        owner._parameters, owner._buffers = parameters, buffers


def share_holders(whole: fx.GraphModule, units: Sequence[fx.GraphModule]) -> None:
    """Let a module made of units keep such tensors where the units keep theirs.

    Layers are shared as modules, and what is replaced in one (by ``to_empty``, or by weights that are assigned) is
    replaced in the other. These tensors have no module to share, so what is shared is the dictionary that they are in.
    """
    readers = Counter(name for unit in units for name in _names(unit))
    for unit in units:
        for name in (name for name in _names(unit) if readers[name] == 1):
            mine, theirs = whole.get_submodule(name), unit.get_submodule(name)
            mine._parameters, mine._buffers = theirs._parameters, theirs._buffers


def _names(unit: fx.GraphModule) -> set[str]:
    """Names of the modules whose own tensors a graph reads."""
    return {str(node.target).rpartition(".")[0] for node in unit.graph.nodes if node.op == "get_attr"}


def _emptied(module: nn.Module) -> nn.Module:
    empty = copy.copy(module)
    empty._parameters = {name: _on_meta(tensor) for name, tensor in module._parameters.items()}  # type: ignore[misc]
    empty._buffers = {name: _on_meta(tensor) for name, tensor in module._buffers.items()}
    empty._modules = {}
    return empty


def _on_meta(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
