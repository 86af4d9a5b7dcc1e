"""Rows of fixed size in a user's file, read on request, and images in such rows.

They are not memory-mapped: if a mapped file is truncated, reading it ends the process (SIGBUS).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from snugfit._core.documents import open_regular
from snugfit._data.sets import ImageSet, resized
from snugfit.errors import DataError

_CHUNK = 1 << 18


class Records:
    """Bytes of a file from ``start`` on as an array, rows first; only rows that are read are in memory."""

    def __init__(self, path: Path, start: int, shape: tuple[int, ...]) -> None:
        self.path, self.shape, self._start = path, shape, start
        self._row = math.prod(shape[1:])
        self._file = os.fdopen(open_regular(path), "rb", buffering=0)  # closed with the last reference to it
        self._descriptor = self._file.fileno()

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Read rows, (B,) -> uint8 (B, ...)."""
        made, size = np.empty(len(indices) * self._row, dtype=np.uint8), self._row
        view = made.data
        for number, index in enumerate(indices.tolist()):
            self._read(view[number * size : (number + 1) * size], self._start + index * size)
        return made.reshape(-1, *self.shape[1:])

    def columns(self, first: int, last: int) -> np.ndarray:
        """Read bytes ``first`` to ``last`` of every row, uint8 (N, last - first)."""
        made = np.empty((len(self), last - first), dtype=np.uint8)
        step = max(1, _CHUNK // self._row)
        for begin in range(0, len(self), step):
            rows = np.empty((min(step, len(self) - begin), self._row), dtype=np.uint8)
            self._read(rows.reshape(-1).data, self._start + begin * self._row)
            made[begin : begin + step] = rows[:, first:last]
        return made

    def _read(self, view: memoryview, offset: int) -> None:
        while (got := os.preadv(self._descriptor, [view], offset)) < len(view):
            if not got:
                left = os.fstat(self._descriptor).st_size
                raise DataError(f"{self.path} was truncated to {left:,} bytes while it was in use. Download it again.")
            view, offset = view[got:], offset + got


class RecordImages(ImageSet):
    """Images (C, H, W) in the last bytes of the rows of one file or several, with a black border or resized."""

    def __init__(self, files: Sequence[Records], labels: np.ndarray, shape: tuple[int, int, int], size: int) -> None:
        self._files, self.labels, self._shape, self._size = files, labels, shape, size
        self._border = border_of(shape[-1], size)
        self._starts = np.cumsum([0] + [len(records) for records in files])

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> uint8 (B, C, size, size)."""
        pixels = np.empty((len(indices), math.prod(self._shape)), dtype=np.uint8)
        owner = np.searchsorted(self._starts, indices, side="right") - 1
        for file in np.unique(owner):
            chosen = owner == file
            rows = self._files[file].rows(indices[chosen] - self._starts[file])
            pixels[chosen] = rows.reshape(len(rows), -1)[:, -pixels.shape[1] :]
        batch = torch.from_numpy(pixels).view(-1, *self._shape)
        return F.pad(batch, (self._border,) * 4) if self._border else resized(batch, self._size)


def border_of(side: int, size: int) -> int:
    """Black pixels on every side that make images of MNIST's 28 x 28 pixels as large as CIFAR's; 0 for other sizes."""
    return (size - side) // 2 if (side, size) == (28, 32) else 0
