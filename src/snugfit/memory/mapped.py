"""Tensors in unnamed memory-mapped files: the kernel may drop their pages, so they take no private memory.

Unlike :mod:`snugfit.memory.scratch`, operators work on them in place, part by part. Files lose their name as soon as
they are created, so nothing is left behind, however the process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from snugfit.errors import OutOfStorageError, is_out_of_storage
from snugfit.memory.scratch import stored_bytes
from snugfit.memory.tensors import exclude_storage


class MappedScratch:
    """Storage for tensors on disk; it is reused for a tensor of the same shape once nothing refers to the old one.

    The storage of a batch also serves smaller ones. So files neither grow nor shrink between steps, and the kernel's
    high-water mark of memory can be separated from that of mapped pages.

    Args:
        folder: created if missing. A folder in memory (tmpfs) saves nothing.
        limit: most bytes on disk; the disk's size by default.
        grown: called with the bytes on disk whenever they grow.

    Attributes:
        bytes: on disk now, including those waiting for another tensor.
    """

    def __init__(self, folder: Path, limit: int | None = None, grown: Callable[[int], None] | None = None) -> None:
        self.folder, self.limit, self.grown, self.bytes = folder, limit, grown, 0
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, last: bool = False, meta: bool = False) -> Tensor:
        """Allocate a tensor of this shape with undefined values, which memory counts ignore.

        Args:
            shape: (B, C, H, W).
            dtype: its type.
            last: whether in ``channels_last`` order.
            meta: whether on the meta device, without files; otherwise on the CPU.

        Raises:
            OutOfStorageError: the disk is full, or the limit is reached.
        """
        size = max(stored_bytes(shape, dtype), 1)
        storage = _nowhere(size) if meta else self._storage(size, kind=stored_bytes(shape[1:], dtype))
        exclude_storage(storage)
        batch, channels, height, width = shape
        strides = (channels * height * width, 1, width * channels, channels)
        if not last:
            strides = (channels * height * width, height * width, width, 1)
        made = torch.empty(0, dtype=dtype, device="meta" if meta else "cpu")
        return made.set_(storage, 0, (batch, channels, height, width), strides)

    def _storage(self, size: int, kind: int) -> torch.UntypedStorage:
        """A block as a storage; when the storage is freed, the block can be reused for another of its kind."""
        free = self._free[kind]
        while free and len(free[-1]) < size:
            self.bytes -= len(free.pop())
        block = free.pop() if free else self._block(size)
        view = memoryview(block)
        weakref.finalize(view, free.append, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8, count=size).untyped_storage()

    def _block(self, size: int) -> mmap.mmap:
        """Map a new file and reserve its disk space, because a disk that fills up later would end the process."""
        if self.limit is not None and self.bytes + size > self.limit:
            self._drop_free()
        if self.limit is not None and self.bytes + size > self.limit:
            raise OutOfStorageError(
                f"feature maps in scratch files need {(self.bytes + size) / 1e6:.0f} MB, but the storage budget has "
                f"{self.limit / 1e6:.0f} MB. Allow more --storage, or use --scratch off."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                block = mmap.mmap(file.fileno(), size)
        except OSError as error:
            if not is_out_of_storage(error):
                raise
            raise OutOfStorageError(
                f"no space left for {size / 1e6:.0f} MB more of scratch in {self.folder}; free some, choose another "
                "--cache-dir, or use --scratch off."
            ) from error
        self.bytes += size
        if self.grown is not None:
            self.grown(self.bytes)
        return block

    def _drop_free(self) -> None:
        for blocks in self._free.values():
            self.bytes -= sum(map(len, blocks))
            blocks.clear()


def _nowhere(size: int) -> torch.UntypedStorage:
    """A storage on the meta device."""
    return torch.UntypedStorage(size, device="meta")
