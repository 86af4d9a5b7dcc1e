"""Modules whose own tensors a unit reads without calling them, such as a class token or position embeddings.

A unit's graph keeps these tensors under their names, but the modules that they belong to, which know how to initialise
them, are not part of it.
"""

from __future__ import annotations

import copy

import torch
from torch import fx, nn


def owners_of(unit: fx.GraphModule, model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` with a ``reset_parameters`` whose tensors a unit's graph reads directly, by name.

    They are copies on the meta device without sub-modules, so that they hold no weights in memory.
    """
    names = {str(node.target).rpartition(".")[0] for node in unit.graph.nodes if node.op == "get_attr"}
    owners = {name: model.get_submodule(name) for name in sorted(names)}
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
