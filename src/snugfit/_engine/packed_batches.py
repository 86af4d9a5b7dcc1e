"""Batches of several inputs of a network, and the same as one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from snugfit._core.inputs import Input, described, packed_shape
from snugfit._data.prepared import check_integers, inputs_of
from snugfit.errors import UsageError

SeveralInputs = Sequence[Tensor] | Mapping[str, Tensor]
"""Inputs (B, ...) each, by position or by keyword of the forward pass."""


def inputs_of_batch(given: SeveralInputs) -> tuple[tuple[Input, ...], int]:
    """What a batch of inputs (B, ...) has, and B; inputs by keyword are in the order of their names.

    Raises:
        UsageError: they are no tensors of one B, or floats of another type than float32.
        DataError: there is but one, it is empty, or is neither of floats, booleans, signed integers nor uint8.
    """
    if isinstance(given, Mapping) and not all(isinstance(key, str) for key in given):
        raise UsageError(
            "several inputs in a dictionary need strings as keys: the names of the forward pass's arguments."
        )
    named = {key: given[key] for key in sorted(given)} if isinstance(given, Mapping) else None
    values: list[Any] = list(given if named is None else named.values())
    size = batch_size(values)
    for value in values:
        if value.is_floating_point() and value.dtype != torch.float32:
            raise UsageError(f"several inputs are float32, integers or booleans, not {value.dtype}; convert them.")
    first = [value[0] for value in values]
    return inputs_of(first if named is None else dict(zip(named, first, strict=True)), 0), size


def batch_size(values: Sequence[Any]) -> int:
    """Items of several inputs (B, ...); raises UsageError if they are no tensors of one B."""
    for value in values:
        if not isinstance(value, Tensor):
            raise UsageError(f"several inputs of an example must be tensors alone, not {type(value).__name__}.")
    sizes = {len(value) if value.dim() else 0 for value in values}
    if not values:
        raise UsageError("several inputs of an example must be at least two tensors (B, ...).")
    if len(sizes) > 1 or sizes == {0}:
        shapes = " and ".join(str(tuple(value.shape)) for value in values)
        raise UsageError(f"several inputs of an example must be batches of one size, and have shapes {shapes}.")
    return sizes.pop()


def kind_of(images: Tensor | SeveralInputs) -> tuple[object, int]:
    """What images (B, ...) or several inputs (B, ...) are, but for B, and B; raises as :func:`inputs_of_batch`."""
    if isinstance(images, Tensor):
        return tuple(images.shape[1:]), len(images)
    inputs, count = inputs_of_batch(images)
    return described(inputs), count


def as_tensor(given: Tensor | SeveralInputs, inputs: Sequence[Input]) -> Tensor:
    """Images (B, ...) as they are; of several inputs (B, ...) the values (B, 1, 1, N), one after another, in float32.

    Raises:
        DataError: an integer is too large for float32.
    """
    if isinstance(given, Tensor):
        return given
    values = [given[each.name] for each in inputs] if isinstance(given, Mapping) else list(given)
    count = len(values[0])
    made = torch.empty((count, *packed_shape(inputs)), device=values[0].device)
    start = 0
    for number, (each, value) in enumerate(zip(inputs, values, strict=True)):
        check_integers(value, f"input {each.name or number}")
        made[:, 0, 0, start : start + each.values] = value.detach().reshape(count, -1)
        start += each.values
    return made
