"""Tensors in a scratch file, written and read by parts, which take no memory of the process.

A mapped file would need less code, but its pages are part of the resident set while they are in use, and the kernel's
high-water mark, from which peaks are measured, does not distinguish them.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from snugfit.errors import OutOfStorageError, is_out_of_storage


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a scratch file.

    Attributes:
        shape, dtype: of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    _descriptor: int
    _offset: int

    def read(self, rows: slice = slice(None)) -> Tensor:
        """Read rows of the first axis, or all, as a new tensor (rows, ...) on the CPU, in row-major order."""
        start, stop, _ = rows.indices(self.shape[0] if self.shape else 1)
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        found = torch.empty(shape, dtype=self.dtype)
        view, done = _bytes(found), 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._offset + start * self._row_bytes + done)
            if count == 0:
                raise OSError(errno.EIO, "the scratch file is shorter than it was")
            done += count
        return found

    def write(self, tensor: Tensor, start: int = 0) -> None:
        """Overwrite rows of the first axis from ``start`` on by values (rows, ...)."""
        view, done = _bytes(tensor.detach().to("cpu", self.dtype).contiguous()), 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], self._offset + start * self._row_bytes + done)

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class ScratchFile:
    """Context that holds tensors in a file, which is deleted at the end.

    The file's blocks are reserved at once, so that a full disk is noticed before anything is computed.

    Args:
        path: the file; its folder is created if missing.
        size: bytes of all that will be stored, see :func:`stored_bytes`.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, max(size, 1)
        self._descriptor, self._used = -1, 0

    def __enter__(self) -> ScratchFile:
        """Create the file.

        Raises:
            OutOfStorageError: the disk is full.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(self._descriptor, 0, self.size)
        except OSError as error:
            self.__exit__(None, None, None)
            if is_out_of_storage(error):
                raise OutOfStorageError(
                    f"no space left for {self.size / 1e6:.0f} MB of scratch in {self.path.parent}; "
                    "free some or choose another --cache-dir."
                ) from error
            raise
        return self

    def reserve(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> StoredTensor:
        """Reserve space for a tensor of this shape; its values are undefined.

        Raises:
            ValueError: the file is full.
        """
        size = stored_bytes(shape, dtype)
        if self._used + size > self.size:
            raise ValueError(f"{self.path} has no space for {size} more bytes")
        stored = StoredTensor(tuple(shape), dtype, self._descriptor, self._used)
        self._used += size
        return stored

    def store(self, tensor: Tensor) -> StoredTensor:
        """Store a tensor of any shape."""
        stored = self.reserve(tensor.shape, tensor.dtype)
        stored.write(tensor)
        return stored

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


def stored_bytes(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
    """Bytes that a tensor of this shape takes in a file."""
    return math.prod(shape) * dtype.itemsize


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
