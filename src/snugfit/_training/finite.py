"""Which tensors of a state are not finite: NaN nowhere, infinity only in buffers that the model was built with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from snugfit._chain import Unit, UnitStore


def first_not_finite(state: Mapping[str, object], infinite: Collection[str]) -> str | None:
    """The name of the first tensor, of any shape, that holds NaN or infinity; None if all are finite.

    Buffers named in ``infinite`` may hold infinity, also with the name of their kind before a slash (``unit/mask``).
    What is no tensor yet passes.
    """
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and not _is_finite(tensor, name.rpartition("/")[2] in infinite):
            return name
    return None


def infinite_buffers(units: Iterable[Unit], store: UnitStore) -> frozenset[str]:
    """Names of the persistent buffers that hold infinity where units are stored, such as attention masks."""
    found = set[str]()
    for index, unit in enumerate(units):
        names = {name for name, buffer in unit.module.named_buffers() if buffer.is_floating_point()}
        stored = store.map(index) if names else {}
        found |= {name for name in names & stored.keys() if _comparable(stored[name]).isinf().any()}
    return frozenset(found)


def _is_finite(tensor: Tensor, may_be_infinite: bool) -> bool:
    """Whether a tensor, of any shape, is finite, or has no NaN where it may be infinite; integers always are.

    A finite sum shows it without a copy; that of large numbers may overflow.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    tensor = _comparable(tensor)
    if may_be_infinite:
        return not tensor.isnan().any()
    return bool(tensor.sum().isfinite()) or bool(torch.isfinite(tensor).all())


def _comparable(tensor: Tensor) -> Tensor:
    """A tensor of any shape; in float32 if it has 8 bits, for which torch lacks these operators."""
    return tensor.float() if tensor.itemsize == 1 else tensor
