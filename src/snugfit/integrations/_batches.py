"""Batches of a PyTorch loader: one as an example, parts of it, and a loader of micro-batches."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from snugfit._core.parts import part_sizes
from snugfit._engine.step_plan import drawing_nothing
from snugfit.errors import UsageError


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Images of a whole batch.

    Raises:
        UsageError: the loader's batches have no size that is known before they are made.
    """
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    _require_indices(loader, known=isinstance(size, int))
    return int(size)  # type: ignore[arg-type]


def _require_indices(loader: DataLoader[Any], *, known: bool = True) -> None:
    if not known or isinstance(loader.dataset, IterableDataset):
        raise UsageError("a memory budget needs a DataLoader with a batch_size, of a Dataset with indices.")


def example_of(
    loader: DataLoader[Any], count: int, device: torch.device, order: Callable[[Any], Sequence[int]] | None = None
) -> Any:
    """A batch (count, ...) on a device, of the first items, which repeat if there are fewer; nothing is drawn.

    ``order`` gives the indices of the data set, the first items first; by default they are as they come.

    Raises:
        UsageError: the loader's data set has no indices, or no items.
    """
    _require_indices(loader)
    data: Any = loader.dataset
    if not len(data):
        raise UsageError("a memory budget needs an example, and the loader's data set is empty.")
    with drawing_nothing():
        indices = range(len(data)) if order is None else order(data)
        items = [data[indices[number % len(data)]] for number in range(count)]
        return _changed(lambda tensor: tensor.to(device), loader.collate_fn(items))


def _changed(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A batch with its tensors, of any shapes, changed; torch takes no UserDict, such as a tokenizer's, apart."""
    if not isinstance(batch, UserDict):
        return tree_map_only(Tensor, change, batch)
    made = copy(batch)
    made.data = tree_map_only(Tensor, change, batch.data)
    return made


def _tensors(batch: Any) -> list[Tensor]:
    leaves = tree_leaves(batch.data if isinstance(batch, UserDict) else batch)
    return [each for each in leaves if isinstance(each, Tensor)]


def first_tensor(batch: Any) -> Tensor:
    """The first tensor (B, ...) of a batch, such as its images; raises UsageError if there is none."""
    for each in _tensors(batch):
        if each.dim():
            return each
    raise UsageError("a memory budget needs batches of tensors (B, ...); the loader's have none.")


def images_of(batch: Any) -> int:
    """Number of images of a batch: the first dimension of its first tensor, of any shape."""
    return len(first_tensor(batch))


def bytes_of(batch: Any) -> int:
    """Bytes of all tensors of a batch, of any shapes."""
    return sum(each.nbytes for each in _tensors(batch))


def first_of(batch: Any, count: int) -> Any:
    """The first images of a batch: views (count, ...) of those tensors that have one row per image."""
    images = images_of(batch)
    return _changed(lambda each: each[:count] if each.dim() and len(each) == images else each, batch)


class DividedBatches:
    """The batches of a batch sampler, each in equal parts; the images and their order stay the same.

    Libraries weight all parts alike, so a last, smaller batch has as many parts as the others, if it has the images:
    of sizes that differ by at most one.
    """

    def __init__(self, batches: Any, batch_size: int) -> None:
        self.batches, self.whole, self.parts = batches, batch_size, 1
        self.drop_last = getattr(batches, "drop_last", False)

    @property
    def batch_size(self) -> int:
        """Images of a part."""
        return self.whole // self.parts

    def __len__(self) -> int:
        sampler = getattr(self.batches, "sampler", None)
        left = len(sampler) % self.whole if sampler is not None and not self.drop_last else 0
        return (len(self.batches) - bool(left)) * self.parts + min(left, self.parts)

    def __iter__(self) -> Iterator[Sequence[int]]:
        for batch in self.batches:
            indices = list(batch)
            sizes = part_sizes(len(indices), min(self.parts, len(indices)))
            for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
                yield indices[start : start + size]


def divided(loader: DataLoader[Any]) -> tuple[DataLoader[Any], DividedBatches]:
    """A loader like this one, of its class and with its sampler, and its batches, whole until ``parts`` is set."""
    batches = DividedBatches(loader.batch_sampler, batch_size_of(loader))
    made = copy(loader)
    vars(made).update(batch_sampler=batches, _iterator=None)  # a loader lets nobody set its batch sampler
    return made, batches
