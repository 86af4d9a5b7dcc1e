"""Initial weights from a file, matched by name and shape; files of other models are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from snugfit import _models as models
from snugfit._chain import Chain, UnitStore, distinct_state, load_into, release
from snugfit._storage.tensor_file import read_weights
from snugfit._training.finite import first_not_finite, infinite_buffers
from snugfit.errors import CheckpointError

State = Mapping[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
_COUNTS = "num_batches_tracked"
_MOST_NAMES = 6


def load_initial_weights(path: Path, chain: Chain, store: UnitStore) -> None:
    """Replace the initial weights in ``store`` by those of a file.

    A prefix that all names of the file share (``module.``) is dropped. A classifier with another number of classes, or
    without weights in the file, keeps its new weights.

    Raises:
        CheckpointError: the file cannot be read, belongs to another model, or contains values that are not finite, in
            other places than buffers that hold infinity in ``store``.
    """
    taken = _fitting(path, chain, read_weights(path))
    if name := first_not_finite(taken, infinite_buffers(chain.all_units, store)):
        raise CheckpointError(f"{path} holds NaN or infinite values in {name}: its training diverged; give others.")
    for index, unit in enumerate(chain.all_units):
        own = store.load(index)
        load_into(unit, {**own, **{name: taken[name] for name in own if name in taken}})
        store.save(index, unit)
        release(unit)


def check_weights(path: Path, chain: Chain) -> None:
    """Check early, from names and shapes alone, that a file's weights belong to the model.

    Raises:
        CheckpointError: the file cannot be read, or belongs to another model.
    """
    _fitting(path, chain, read_weights(path, device="meta"))


def weights_note(path: Path, chain: Chain) -> str:
    """How many of a network's tensors a file holds, and which it lacks; counts of batches are left out.

    Raises CheckpointError as :func:`check_weights`.
    """
    taken = _fitting(path, chain, read_weights(path, device="meta"))
    names = [name for unit in chain.all_units for name in distinct_state(unit.module) if not name.endswith(_COUNTS)]
    fresh = [name for name in names if name not in taken]
    more = f" and {len(fresh) - _MOST_NAMES} more" if len(fresh) > _MOST_NAMES else ""
    begins = f"; initialised anew: {', '.join(fresh[:_MOST_NAMES])}{more}" if fresh else ""
    return f"{path}: {len(names) - len(fresh)} of {len(names)} tensors loaded{begins}"


def _fitting(path: Path, chain: Chain, file: State) -> dict[str, torch.Tensor]:
    """The file's weights that fit the chain, in their shapes."""
    wanted = {name: shape for unit in chain.all_units for name, shape in _shapes(distinct_state(unit.module)).items()}
    state = next((view for view in _views(file) if wanted.keys() & view.keys()), file)
    taken = {name: state[name] for name, shape in wanted.items() if name in state and state[name].shape == shape}
    _check_fits(path, chain, wanted, state, taken)
    return taken


def _views(state: State) -> Iterator[State]:
    """The weights, in their shapes, with their names and without shared prefixes, outermost first."""
    while state:
        yield state
        dotted = [name for name in state if "." in name]
        if len({name.partition(".")[0] for name in dotted}) != 1:
            return
        state = {name.partition(".")[2]: state[name] for name in dotted}


def _check_fits(path: Path, chain: Chain, wanted: Shapes, state: State, taken: State) -> None:
    fresh = _may_stay_fresh(chain, state)
    missing = [name for name in wanted if not (name in taken or name in fresh or name.endswith(_COUNTS))]
    if missing:
        raise CheckpointError(_why(path, chain, state, missing))
    if not taken:
        raise CheckpointError(f"{path} holds no weights of {chain.name}.")
    if state.keys() - wanted.keys():  # a smaller network's names may all be among a larger one's
        match = _whose(state)
        if match and match.model in models.names() and match.model != chain.name and chain.name in models.names():
            raise CheckpointError(_other_model(path, match.model, chain.name))


def _may_stay_fresh(chain: Chain, state: State) -> Collection[str]:
    """Names of the head's tensors, or of all the classifier's if the file has none of them.

    The head of a network without units is the last of its modules that has weights.
    """
    names = list(chain.head.module.state_dict())
    last = names[-1].rpartition(".")[0]
    fresh = {name for name in names if not chain.undivided or name.rpartition(".")[0] == last}
    for classifier in {name.partition(".")[0] for name in fresh}:
        if not any(name.startswith(f"{classifier}.") for name in state):
            names = [name for unit in chain.all_units for name in unit.module.state_dict()]
            fresh.update(name for name in names if name.startswith(f"{classifier}."))
    return fresh


def _why(path: Path, chain: Chain, state: State, missing: list[str]) -> str:
    """Why weights, of any shapes, do not fit: another image size, other channels, or another model."""
    size = models.trained_image_size(_shapes({name: state[name] for name in missing if name in state}))
    if size and len(missing) == 1:
        return (
            f"{path} holds position embeddings for images of {size} pixels, not {chain.input_shape[-1]}; "
            f"use --image-size {size}."
        )
    match = _whose(state)
    if match and match.model != chain.name:
        return _other_model(path, match.model, chain.name)
    if match and match.channels != chain.input_shape[0]:
        return (
            f"{path} holds weights of {chain.name} for images of {match.channels} channel(s), not "
            f"{chain.input_shape[0]}; train on such images or without --weights."
        )
    return f"{path} does not hold {missing[0]} in the shape of {chain.name}: it belongs to another model."


def _other_model(path: Path, fits: str, asked: str) -> str:
    return f"{path}: these look like the weights of {fits}, not of {asked}; use --model {fits}."


def _whose(state: State) -> models.Match | None:
    """The built-in model that weights, of any shapes, belong to, with any prefix in their names."""
    matches = (models.recognise(_shapes(view)) for view in _views(state))
    return next((match for match in matches if match), None)


def _shapes(state: State) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
