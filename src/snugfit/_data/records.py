"""Rows of fixed size in a user's file, read on request.

They are not memory-mapped: if a mapped file is truncated, reading it ends the process (SIGBUS).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from snugfit._core.documents import open_regular
from snugfit.errors import DataError

_CHUNK = 1 << 18


class Records:
    """Bytes of a file as an array whose first axis is the rows; only rows that are read are in memory.

    Args:
        path: the file.
        start: offset of the first row in bytes.
        shape: rows, and the extents of one.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, start: int, shape: tuple[int, ...]) -> None:
        self.path, self.shape, self._start = path, shape, start
        self._row = math.prod(shape[1:])
        self._file = os.fdopen(open_regular(path), "rb", buffering=0)  # closed with the last reference to it
        self._descriptor = self._file.fileno()

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Read rows, (B,) -> uint8 (B, ...).

        Raises:
            DataError: the file is shorter than it was.
        """
        made, size = np.empty(len(indices) * self._row, dtype=np.uint8), self._row
        view = made.data
        for number, index in enumerate(indices.tolist()):
            self._read(view[number * size : (number + 1) * size], self._start + index * size)
        return made.reshape(-1, *self.shape[1:])

    def columns(self, first: int, last: int) -> np.ndarray:
        """Read bytes ``first`` to ``last`` of every row, uint8 (N, last - first).

        Raises:
            DataError: the file is shorter than it was.
        """
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
