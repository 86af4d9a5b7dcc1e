"""Tensors on disk, which take no private memory: written and read by parts, or mapped so that operators work in place.

Pages of a mapped file are part of the resident set while they are in use, and the kernel's high-water mark, from which
peaks are measured, does not distinguish them.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from snugfit.errors import OutOfStorageError, is_out_of_storage
from snugfit.memory.tensors import exclude_storage


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a scratch file, in row-major order or, with ``last``, in ``channels_last``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    last: bool
    _descriptor: int
    _offset: int

    def read(self, rows: slice = slice(None)) -> Tensor:
        """Read rows of the first axis, or all, as a new tensor (rows, ...) on the CPU, in the order of the file."""
        start, stop, _ = rows.indices(self.shape[0] if self.shape else 1)
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        found = torch.empty(shape, dtype=self.dtype, memory_format=self._order)
        view, done = _bytes(found, last=self.last), 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._offset + start * self._row_bytes + done)
            if count == 0:
                raise OSError(errno.EIO, "the scratch file is shorter than it was")
            done += count
        return found

    def write(self, tensor: Tensor, start: int = 0) -> None:
        """Overwrite rows of the first axis from ``start`` on by values (rows, ...)."""
        ordered = tensor.detach().to("cpu", self.dtype).contiguous(memory_format=self._order)
        view, done = _bytes(ordered, last=self.last), 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], self._offset + start * self._row_bytes + done)

    @property
    def _order(self) -> torch.memory_format:
        return torch.channels_last if self.last else torch.contiguous_format

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
        """Create the file; raises OutOfStorageError if the disk is full."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            reserve_space(self._descriptor, 0, self.size, self.path.parent)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def reserve(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, last: bool = False) -> StoredTensor:
        """Reserve space for a tensor of this shape, in ``channels_last`` if ``last``; its values are undefined.

        Raises:
            ValueError: the file is full.
        """
        size = stored_bytes(shape, dtype)
        if self._used + size > self.size:
            raise ValueError(f"{self.path} has no space for {size} more bytes")
        stored = StoredTensor(tuple(shape), dtype, last, self._descriptor, self._used)
        self._used += size
        return stored

    def store(self, tensor: Tensor) -> StoredTensor:
        """Store a tensor of any shape, in its own order, so that neither writing nor reading copies it."""
        stored = self.reserve(tensor.shape, tensor.dtype, last=is_channels_last(tensor))
        stored.write(tensor)
        return stored

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor of any shape has four axes in ``channels_last`` order."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def stored_bytes(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
    """Bytes that a tensor of this shape takes in a file."""
    return math.prod(shape) * dtype.itemsize


def reserve_space(descriptor: int, start: int, size: int, folder: Path, alternative: str = "") -> None:
    """Reserve bytes of a file in ``folder``, so that writing them cannot fail later; errors name an alternative flag.

    Raises:
        OutOfStorageError: the disk is full.
    """
    try:
        os.posix_fallocate(descriptor, start, size)
    except OSError as error:
        raise storage_error(error, size, folder, alternative) from error


def storage_error(error: OSError, size: int, folder: Path, alternative: str = "") -> OSError | OutOfStorageError:
    """The error to raise where ``size`` bytes could not be written: the same, unless the disk is full."""
    if not is_out_of_storage(error):
        return error
    advice = f"choose another --cache-dir, or use {alternative}" if alternative else "or choose another --cache-dir"
    return OutOfStorageError(f"no space left for {size / 1e6:.0f} MB of scratch in {folder}; free some, {advice}.")


def over_limit(size: int, limit: int, alternative: str) -> OutOfStorageError:
    """The error about scratch files of ``size`` bytes that exceed the storage budget."""
    return OutOfStorageError(
        f"feature maps in scratch files need {size / 1e6:.0f} MB, but the storage budget has {limit / 1e6:.0f} MB. "
        f"Allow more --storage, or use {alternative}."
    )


def _bytes(tensor: Tensor, *, last: bool) -> memoryview:
    """The memory of a dense tensor of any shape, in ``channels_last`` order if ``last``."""
    ordered = tensor.permute(0, 2, 3, 1) if last else tensor
    return ordered.view(-1).view(torch.uint8).numpy().data


class MappedScratch:
    """Storage for tensors in unnamed memory-mapped files, whose pages the kernel may drop.

    It is reused for a tensor of the same shape once nothing refers to the old one, and that of a batch also serves
    smaller ones. So files neither grow nor shrink between steps, and the kernel's high-water mark of memory can be
    separated from that of mapped pages. Files have no name, so nothing is left behind, however the process ends.

    Args:
        folder: created if missing. A folder in memory (tmpfs) saves nothing.
        limit: most bytes on disk; the disk's size by default.
        grown: called with the bytes on disk whenever they grow.
        alternative: flag, named in errors, with which no file is needed.

    Attributes:
        bytes: on disk now, including those waiting for another tensor.
    """

    def __init__(
        self,
        folder: Path,
        limit: int | None = None,
        grown: Callable[[int], None] | None = None,
        alternative: str = "--scratch off",
    ) -> None:
        self.folder, self.limit, self.grown, self.alternative, self.bytes = folder, limit, grown, alternative, 0
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, last: bool = False, meta: bool = False) -> Tensor:
        """Allocate a tensor (B, C, H, W) with undefined values, which memory counts ignore.

        With ``last`` it is in ``channels_last`` order; with ``meta`` on the meta device, without files.

        Raises:
            OutOfStorageError: the disk is full, or the limit is reached.
        """
        size = max(stored_bytes(shape, dtype), 1)
        storage = (
            torch.UntypedStorage(size, device="meta")
            if meta
            else self._storage(size, kind=stored_bytes(shape[1:], dtype))
        )
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
            raise over_limit(self.bytes + size, self.limit, self.alternative)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            reserve_space(file.fileno(), 0, size, self.folder, self.alternative)
            block = mmap.mmap(file.fileno(), size)
        self.bytes += size
        if self.grown is not None:
            self.grown(self.bytes)
        return block

    def _drop_free(self) -> None:
        for blocks in self._free.values():
            self.bytes -= sum(map(len, blocks))
            blocks.clear()
