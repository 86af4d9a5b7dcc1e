"""Photos that are decoded once: their pixels are kept in a file without a name, which ends with the process."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from snugfit.errors import is_out_of_storage

FREE_SHARE = 0.1
"""Share of a disk's free space that pixels may take where no storage budget is given."""
_AT_ONCE = 16
"""Images that are decoded at once beside those that are kept, so that a batch is not in memory twice."""
_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are memory."""
_MOUNTS = Path("/proc/mounts")


class DecodedFile:
    """A file for pixels, which is made when the first are added.

    Args:
        folder: where; created if missing.
        most_bytes: largest size. What would exceed it is not kept, nothing more is once the disk is full, and nothing
            at all where no file can be made.
        grown: called with the file's bytes whenever there are more.
    """

    def __init__(self, folder: Path, most_bytes: int, grown: Callable[[int], None] = lambda size: None) -> None:
        self.folder, self.most_bytes, self._grown = folder, most_bytes, grown
        self._descriptor: int | None = None
        self._used, self._lock = 0, threading.Lock()

    def add(self, pixels: np.ndarray) -> np.ndarray:
        """Write uint8 pixels (M, ...); returns the place of each, (M,) int64, or -1 where it is not kept."""
        places = np.full(len(pixels), -1, dtype=np.int64)
        with self._lock:
            for row, image in enumerate(np.ascontiguousarray(pixels)):
                if self._used + image.nbytes > self.most_bytes:
                    break
                try:
                    self._write(image)
                except OSError as error:
                    if self._descriptor is not None and not is_out_of_storage(error):
                        raise
                    self.most_bytes = self._used
                    break
                places[row] = self._used
                self._used += image.nbytes
            self._grown(self._used)
        return places

    def _write(self, image: np.ndarray) -> None:
        if self._descriptor is None:
            self._descriptor = self._unnamed()
            weakref.finalize(self, os.close, self._descriptor)
        if os.pwrite(self._descriptor, image.data, self._used) < image.nbytes:
            raise OSError(errno.ENOSPC, "the disk is full")

    def _unnamed(self) -> int:
        """A new file; its folder is left only if it was there before."""
        made = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            descriptor = os.dup(file.fileno())
        if made:
            self.folder.rmdir()
        return descriptor

    def read(self, place: int, pixels: np.ndarray) -> None:
        """Read into contiguous uint8 pixels (...) what was written at a place."""
        assert self._descriptor is not None
        if os.preadv(self._descriptor, [pixels.data], place) < pixels.nbytes:
            raise OSError(errno.EIO, "decoded images could not be read back", str(self.folder))


class KeptPixels:
    """The pixels of one image set, of ``count`` images of (H, W, C), as far as they were decoded."""

    def __init__(self, file: DecodedFile, count: int, shape: tuple[int, int, int]) -> None:
        self._file, self._shape = file, shape
        self._places = np.full(count, -1, dtype=np.int64)

    def images(self, indices: np.ndarray, decode: Callable[[np.ndarray], torch.Tensor]) -> torch.Tensor:
        """Images (B,) as uint8 (B, C, H, W), channels-last; ``decode`` makes (M, C, H, W) of those not kept, (M,)."""
        kept = self._places[indices] >= 0
        if not kept.any():
            return self._decoded(indices, decode)
        pixels = torch.empty((len(indices), *self._shape), dtype=torch.uint8)
        for row in np.flatnonzero(kept):
            self._file.read(int(self._places[indices[row]]), pixels[row].numpy())
        images, missing = pixels.permute(0, 3, 1, 2), np.flatnonzero(~kept)
        for first in range(0, len(missing), _AT_ONCE):
            rows = missing[first : first + _AT_ONCE]
            images[torch.from_numpy(rows)] = self._decoded(indices[rows], decode)
        return images

    def _decoded(self, indices: np.ndarray, decode: Callable[[np.ndarray], torch.Tensor]) -> torch.Tensor:
        """Decode images (M,) to uint8 (M, C, H, W), channels-last, and keep them."""
        images = decode(indices)
        self._places[indices] = self._file.add(images.permute(0, 2, 3, 1).numpy())
        return images


def space_for_pixels(folder: Path, storage_bytes: int | None, needed_bytes: int) -> int:
    """Bytes that decoded images may take in a folder.

    Args:
        folder: need not exist yet.
        storage_bytes: the storage budget; without one it is a share of what the disk has free.
        needed_bytes: what the strategy may write there.
    """
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if _is_memory(there):
        return 0
    if storage_bytes is not None:
        return max(storage_bytes - needed_bytes, 0)
    return int(max(shutil.disk_usage(there).free - needed_bytes, 0) * FREE_SHARE)


def _is_memory(folder: Path) -> bool:
    """Whether files in a folder take memory instead of disk."""
    with contextlib.suppress(OSError):
        mounts = [line.split() for line in _MOUNTS.read_text(errors="replace").splitlines()]
        kinds = {fields[1]: fields[2] for fields in mounts if len(fields) > 2}
        nearest = next((kinds[str(each)] for each in (folder, *folder.parents) if str(each) in kinds), "")
        return nearest in _IN_MEMORY
    return False
