"""Initial weights of a chain, one unit in memory at a time.

Some modules own tensors that a unit reads without calling them, such as a class token or position embeddings. A unit's
graph keeps these tensors under their names, but not the modules that own and initialise them.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from types import MappingProxyType
from typing import cast

import torch
from torch import fx, nn

from snugfit._chain.store import replace_stored
from snugfit._chain.unit import Unit
from snugfit.errors import ModelError

Resets = Mapping[type[nn.Module], Callable[[nn.Module], None]]
"""Functions that initialise a layer of a type, instead of the layer's ``reset_parameters``."""


def initialise_by_reset(unit: Unit, seed: int, instead: Resets = MappingProxyType({})) -> None:
    """Materialise one unit on the CPU with new weights: ``reset_parameters()`` of each of its layers.

    A module resets its own tensors, and leaves those of its sub-modules to them. The weights depend only on the seed
    and the unit's name, not on the order of units or on earlier random numbers; the global generator's state is
    restored.

    Args:
        unit: of a chain, with or without weights.
        seed: of its random numbers.
        instead: functions that initialise layers of these types, called instead of ``reset_parameters``.

    Raises:
        ModelError: a module holds parameters or buffers but has no ``reset_parameters``.
    """
    resets = _resets(unit, instead)
    replace_stored(unit, lambda tensor: torch.empty_like(tensor, device="cpu"))
    digest = hashlib.sha256(f"{seed}:{unit.name}".encode()).digest()
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
        for reset in resets:
            reset()
    finally:
        torch.set_rng_state(state)


def _resets(unit: Unit, instead: Resets) -> list[Callable[[], None]]:
    """The function that initialises each module with its own parameters or buffers."""
    resets = []
    for name, module in unit.module.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if all(tensor is None for tensor in own):
            continue
        reset = getattr(module, "reset_parameters", None)
        if type(module) in instead:
            reset = functools.partial(instead[type(module)], module)
        elif name in unit.owners:
            reset = functools.partial(_reset_by_owner, unit.owners[name], module)
        if reset is None:
            raise ModelError(
                f"{name or unit.name} ({type(module).__name__}) holds weights but has no reset_parameters(); "
                "add one, or build the model on the CPU."
            )
        resets.append(cast(Callable[[], None], reset))
    return resets


def parameter_owners(unit: fx.GraphModule, model: nn.Module) -> dict[str, nn.Module]:
    """Modules of ``model`` with ``reset_parameters`` whose tensors a unit's graph reads directly, by name.

    They are copies on the meta device without sub-modules, so they hold no weights in memory.
    """
    owners = {name: model.get_submodule(name) for name in sorted(_owner_names(unit))}
    return {name: _emptied(owner) for name, owner in owners.items() if hasattr(owner, "reset_parameters")}


def _reset_by_owner(owner: nn.Module, holder: nn.Module) -> None:
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
    readers = Counter(name for unit in units for name in _owner_names(unit))
    for unit in units:
        for name in (name for name in _owner_names(unit) if readers[name] == 1):
            mine, theirs = whole.get_submodule(name), unit.get_submodule(name)
            mine._parameters, mine._buffers = theirs._parameters, theirs._buffers


def _owner_names(unit: fx.GraphModule) -> set[str]:
    """Names of the modules whose own tensors a graph reads."""
    return {str(node.target).rpartition(".")[0] for node in unit.graph.nodes if node.op == "get_attr"}


def _emptied(module: nn.Module) -> nn.Module:
    empty = copy.copy(module)
    empty._parameters = {
        name: each if each is None else nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        for name, each in module._parameters.items()
    }
    empty._buffers = {
        name: each if each is None else torch.empty_like(each, device="meta") for name, each in module._buffers.items()
    }
    empty._modules = {}
    return empty
