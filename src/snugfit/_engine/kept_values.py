"""Values of weights kept in a file, where a copy in memory would count as the loop's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from snugfit._storage.tensor_file import map_tensors, write_tensors


@contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors of any shapes their values back, which lie in a temporary file meanwhile.

    Raises:
        OutOfStorageError, CheckpointError: the file cannot be written.
    """
    kept = {str(index): each.detach() for index, each in enumerate(tensors)}
    with tempfile.TemporaryDirectory(prefix="snugfit-") as folder:
        path = Path(folder) / "weights.safetensors"
        write_tensors(path, kept, along_memory=True)
        try:
            yield
        finally:
            for name, values in map_tensors(path).items():
                kept[name].copy_(values)
