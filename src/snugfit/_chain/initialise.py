"""Initial weights of a chain, one unit in memory at a time."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from snugfit._chain.chain import Chain
from snugfit._chain.parameter_owners import reset_by_owner
from snugfit._chain.store import UnitStore, release, replace_stored
from snugfit._chain.unit import Unit
from snugfit.errors import ModelError


def initialise_by_reset(unit: Unit, seed: int) -> None:
    """Materialise one unit on the CPU with new weights: ``reset_parameters()`` of each of its layers.

    A module resets its own tensors, and leaves those of its sub-modules to them. The weights depend only on the seed
    and the unit's name, not on the order of units or on earlier random numbers; the global generator's state is
    restored.


    Raises:
        ModelError: a module holds parameters or buffers but has no ``reset_parameters``.
    """
    resets = _resets(unit)
    replace_stored(unit, lambda tensor: torch.empty_like(tensor, device="cpu"))
    digest = hashlib.sha256(f"{seed}:{unit.name}".encode()).digest()
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
        for reset in resets:
            reset()
    finally:
        torch.set_rng_state(state)


def spill_module(chain: Chain, store: UnitStore) -> None:
    """Write the weights of a chain made from a real model to a store, releasing each unit once it is written.

    Raises:
        OutOfStorageError: the disk is full.
    """
    for index, unit in enumerate(chain.all_units):
        store.save(index, unit)
        release(unit)


def _resets(unit: Unit) -> list[Callable[[], None]]:
    """The ``reset_parameters`` of every module with its own parameters or buffers."""
    resets = []
    for name, module in unit.module.named_modules():
        if not _holds_tensors(module):
            continue
        reset = getattr(module, "reset_parameters", None)
        if name in unit.owners:
            reset = functools.partial(reset_by_owner, unit.owners[name], module)
        if reset is None:
            raise ModelError(
                f"{name or unit.name} ({type(module).__name__}) holds weights but has no reset_parameters(); "
                "add one, or build the model on the CPU."
            )
        resets.append(cast(Callable[[], None], reset))
    return resets


def _holds_tensors(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor is not None for tensor in own)
