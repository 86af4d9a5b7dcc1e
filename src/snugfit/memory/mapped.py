"""Tensors in a file that is mapped into memory: they take none of the process's own, and the system may drop them."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from snugfit.errors import OutOfStorageError

_ALIGNED = 64


def mapped_bytes(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that :meth:`MappedTensors.take` uses for a tensor of this shape."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


class MappedTensors:
    """Context that holds tensors in a scratch file of fixed size, which is deleted at the end.

    The file's blocks are reserved at once: writing to a mapped file on a full disk would end the process.

    Args:
        path: the file; its folder is made.
        size: bytes, the sum of :func:`mapped_bytes` of what will be taken.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, max(size, _ALIGNED)
        self._memory: Tensor | None = None
        self._used = 0

    def __enter__(self) -> MappedTensors:
        """Make the file.

        Raises:
            OutOfStorageError: the disk has no room for it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, self.size)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfStorageError(
                    f"no space left for {self.size / 1e6:.0f} MB of scratch in {self.path.parent}; "
                    "free some or choose another --cache-dir."
                ) from error
            raise
        finally:
            os.close(descriptor)
        self._memory = torch.from_file(str(self.path), shared=True, size=self.size, dtype=torch.uint8)
        return self

    def take(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of this shape, contiguous, on the CPU; its values are undefined.

        Raises:
            ValueError: the file is used up.
        """
        size = mapped_bytes(shape, dtype)
        if self._memory is None or self._used + size > self.size:
            raise ValueError(f"{self.path} has no room for {size} more bytes")
        piece = self._memory[self._used : self._used + math.prod(shape) * dtype.itemsize]
        self._used += size
        return piece.view(dtype).view(shape)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory = None
        self.path.unlink(missing_ok=True)
