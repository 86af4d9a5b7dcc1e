"""Values of weights kept in a file, where a copy in memory would count as the loop's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from snugfit._storage.write_errors import storage_errors

_PART = 1 << 18
"""Values at once, so that a tight limit has room for them."""


@contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors of any shapes their values back, which lie in a temporary file meanwhile.

    Raises:
        OutOfStorageError, CheckpointError: the file cannot be written.
    """
    kept = list(tensors)
    with tempfile.TemporaryFile() as file:
        with storage_errors(Path(tempfile.gettempdir()), sum(each.nbytes for each in kept)):
            for part in _parts_of(kept):
                file.write(part.cpu().view(torch.uint8).numpy().data)
            file.flush()
        try:
            yield
        finally:
            file.seek(0)
            for part in _parts_of(kept):
                part.copy_(torch.frombuffer(bytearray(file.read(part.nbytes)), dtype=part.dtype))


def _parts_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Views (n,) of the values of tensors of any shapes, in the order of their memory."""
    for each in tensors:
        if not each.numel():
            continue
        values = each.detach()
        last = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
        if last + 1 == each.numel():  # nothing lies between, in whatever order of axes
            yield from values.as_strided((each.numel(),), (1,)).split(_PART)
        else:
            yield from (part for row in values for part in _parts_of([row]))
