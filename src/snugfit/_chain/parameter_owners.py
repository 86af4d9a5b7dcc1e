"""Modules whose own tensors a unit reads without calling them, such as a class token or position embeddings.

A unit's graph keeps these tensors under their names, but not the modules that own and initialise them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from operator import methodcaller

import torch
from torch import fx, nn


def parameter_owners(unit: fx.GraphModule, model: nn.Module) -> dict[str, nn.Module]:
    """Modules of ``model`` with ``reset_parameters`` whose tensors a unit's graph reads directly, by name.

    They are copies on the meta device without sub-modules, so they hold no weights in memory.
    """
    owners = {name: model.get_submodule(name) for name in sorted(_names(unit))}
    return {name: _emptied(owner) for name, owner in owners.items() if hasattr(owner, "reset_parameters")}


def reset_by_owner(owner: nn.Module, holder: nn.Module) -> None:
    """Let ``owner`` initialise those of its tensors that ``holder``, a part of a unit's module, has in memory."""
    parameters, buffers = owner._parameters, owner._buffers
    owner._parameters = {**parameters, **{k: v for k, v in holder._parameters.items() if k in parameters}}
    owner._buffers = {**buffers, **{k: v for k, v in holder._buffers.items() if k in buffers}}
    try:
        methodcaller("reset_parameters")(owner)
    finally:
        owner._parameters, owner._buffers = parameters, buffers


def share_parameter_dicts(whole: fx.GraphModule, units: Sequence[fx.GraphModule]) -> None:
    """Make a module that is built from units share such tensors with the units.

    Layers are shared as modules, and a tensor replaced in one (by ``to_empty``, or by assigned weights) is replaced in
    the other. These tensors have no shared module, so their dictionary is shared.
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
    empty._parameters = {
        name: tensor if tensor is None else nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
        for name, tensor in module._parameters.items()
    }
    empty._buffers = {
        name: tensor if tensor is None else torch.empty_like(tensor, device="meta")
        for name, tensor in module._buffers.items()
    }
    empty._modules = {}
    return empty
