"""Weights of units: in files, one per unit, and in the units themselves."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from snugfit._chain.unit import Unit
from snugfit._storage.manifest import Manifest
from snugfit._storage.tensor_file import map_tensors, read_tensors, write_tensors
from snugfit._upstream import get_tensor, kept_shared, set_tensor, shared_names
from snugfit.errors import CheckpointError

T = TypeVar("T")
_ADVICE = "Delete it, and restore or retrain the unit."


class UnitStore:
    """One file per unit in a folder, such as ``unit_003_features.10.safetensors``; a manifest may list them."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder, self._manifest = Path(folder), manifest
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, index: int, unit_or_state: Unit | Mapping[str, torch.Tensor]) -> Path:
        """Write a unit's weights, in their shapes, replacing older ones only once all is on disk; returns the file.

        Those of a ``Unit`` are its state dict, each once, and buffers that are not in it. See
        :func:`snugfit._storage.tensor_file.write_tensors` for what is copied.

        Raises:
            OutOfStorageError: the disk is full; what was stored before is intact.
            CheckpointError: the weights are not in memory, or the file cannot be written.
        """
        if isinstance(unit_or_state, Unit):
            name, state = unit_or_state.name, {**distinct_state(unit_or_state.module), **unit_or_state.other_buffers}
        else:
            name, state = "", dict(unit_or_state)
        suffix = f"_{re.sub(r'[^A-Za-z0-9._-]', '_', name)}" if name else ""
        path = self._find(index) or self.folder / f"unit_{index:03d}{suffix}.safetensors"
        write_tensors(path, state, self._manifest)
        return path

    def load(self, index: int) -> dict[str, torch.Tensor]:
        """Read a unit's weights, in their shapes, into private memory, in one pass over the file.

        Raises:
            CheckpointError: nothing is stored, or the file is truncated or corrupt.
        """
        return read_tensors(self.path(index), _ADVICE)

    def map(self, index: int) -> dict[str, torch.Tensor]:
        """Map a unit's weights, in their shapes, read-only.

        The system may drop the pages, so they take no private memory. For forward passes only: writing to such a tensor
        ends the process.

        Raises:
            CheckpointError: nothing is stored, or the file is truncated or corrupt.
        """
        return map_tensors(self.path(index), _ADVICE)

    def path(self, index: int) -> Path:
        """The file of a unit's weights; raises CheckpointError if nothing is stored."""
        path = self._find(index)
        if path is None:
            raise CheckpointError(f"no weights of unit {index} in {self.folder}; the run folder is incomplete.")
        return path

    def _find(self, index: int) -> Path | None:
        pattern = re.compile(rf"unit_{index:03d}(_.*)?\.safetensors")
        return next((path for path in sorted(self.folder.iterdir()) if pattern.fullmatch(path.name)), None)


def distinct_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, with each tensor, of any shape, under the first of its names only."""
    shared = shared_names(module)
    return {name: tensor for name, tensor in module.state_dict().items() if name not in shared}


def load_state(module: nn.Module, state: Mapping[str, torch.Tensor], *, assign: bool = False) -> None:
    """Load tensors of :func:`distinct_state`, of any shapes; with ``assign`` the module takes them as they are."""
    shared = {name: state[first] for name, first in shared_names(module).items() if first in state}
    with kept_shared(module):
        module.load_state_dict({**shared, **state}, assign=assign)


def load_into(unit: Unit, state: Mapping[str, torch.Tensor]) -> None:
    """Give a unit its weights: a released unit takes the tensors themselves, one in memory copies them.

    A released unit gets new ``Parameter`` objects, so optimizers are made afterwards.

    Raises:
        CheckpointError: names or shapes are not the unit's.
    """
    own, others = distinct_state(unit.module), unit.other_buffers
    weights = {name: tensor for name, tensor in state.items() if name not in others}
    _check_matches(unit.name, own, weights)
    assign = any(tensor.is_meta for tensor in own.values())
    load_state(unit.module, {name: tensor.to(own[name].dtype) for name, tensor in weights.items()}, assign=assign)
    for name in others.keys() & state.keys():
        set_tensor(unit.module, name, state[name])


def release(unit: Unit) -> None:
    """Free a unit's weights: parameters and stored buffers become meta tensors. Gradients go too."""
    replace_stored(unit, lambda tensor: torch.empty_like(tensor, device="meta"))


def spill_module(units: Iterable[Unit], store: UnitStore) -> None:
    """Write the weights of units made from a real model to a store, releasing each unit once it is written.

    Raises:
        OutOfStorageError: the disk is full.
    """
    for index, unit in enumerate(units):
        store.save(index, unit)
        release(unit)


def replace_stored(unit: Unit, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every tensor, of any shape, of a unit's state dict by ``make(tensor)``; parameters stay parameters."""
    with kept_shared(unit.module):
        for name in distinct_state(unit.module):
            tensor = get_tensor(unit.module, name)
            value = make(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            set_tensor(unit.module, name, value)


def _check_matches(unit: str, own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in own.items():
        if name not in state:
            raise CheckpointError(f"unit {unit}: the stored weights lack {name}; they belong to another model.")
        if state[name].shape != tensor.shape:
            shapes = f"{tuple(state[name].shape)}, not {tuple(tensor.shape)}"
            raise CheckpointError(f"unit {unit}: stored {name} has shape {shapes}; it belongs to another model.")
    extra = next((name for name in state if name not in own), None)
    if extra is not None:
        raise CheckpointError(f"unit {unit} has no {extra}; the stored weights belong to another model.")


def copy_empty(value: T, module: nn.Module, device: str) -> T:
    """A deep copy of a value whose tensors, those of ``module``, are new and empty; shared ones stay shared."""
    memo: dict[int, Any] = {}
    plain = (each for layer in module.modules() for each in vars(layer).values() if isinstance(each, Tensor))
    for tensor in [*module.parameters(), *module.buffers(), *plain]:
        empty = torch.empty_like(tensor, device=device)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(value, memo)
