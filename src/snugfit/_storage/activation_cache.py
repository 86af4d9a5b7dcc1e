"""The activation cache: a trained block's outputs in one file on disk, and batches read back from it.

NeuroFlux section 5.3. Rows are read with ``preadv`` and not mapped, because mapped pages blur the measured memory.
Feature maps are stored with the channels last, so that they are read as ``channels_last`` tensors without a transpose.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from snugfit._core.documents import read_data
from snugfit._core.options import CacheDtype
from snugfit._core.serial import to_data
from snugfit._quantities import format_bytes
from snugfit._storage.digests import Digester, sync_file
from snugfit._storage.files import read_exactly, write_json_atomic
from snugfit._storage.manifest import Manifest
from snugfit._storage.tensor_file import as_bytes
from snugfit._storage.write_errors import storage_errors
from snugfit.errors import CheckpointError, OutOfStorageError, UsageError

FORMAT = 1
"""Version of the layout on disk."""

LABEL_BYTES = 8
"""Bytes of a row's label."""

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CHANNEL_RANGE_ELEMENTS = 64
_SLICE_BYTES = 1 << 20


@dataclass(frozen=True)
class RowFormat:
    """Layout of cached rows.

    A row has the shape ``(C, H, W)`` or ``(D,)``. ``uint8`` rows are affine: each range of a row has its smallest value
    and its step, then ``value = smallest + step * byte``, so no value is clipped and the error is at most half a step,
    (largest - smallest) / 510. A range is one channel of one row. In feature maps of fewer than 64 elements, where two
    floats per channel would cost more than an eighth of the bytes, it is the whole row. ``float16`` saturates at 65504
    instead of overflowing.
    """

    row_shape: tuple[int, ...]
    dtype: CacheDtype

    @property
    def elements(self) -> int:
        """Values in a row."""
        return prod(self.row_shape)

    @property
    def ranges(self) -> int:
        """Affine ranges in a row; 0 for the float types."""
        if self.dtype != "uint8":
            return 0
        return self.row_shape[0] if prod(self.row_shape[1:]) >= _CHANNEL_RANGE_ELEMENTS else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        if self.dtype != "uint8":
            return self.elements * _FLOATS[self.dtype].itemsize
        return 8 * self.ranges + -(-self.elements // 4) * 4

    def encode(self, features: Tensor) -> Tensor:
        """Turn features (B, *row_shape) into contiguous CPU bytes (B, row_bytes), uint8.

        Float32 features whose memory has the stored order are viewed, not copied.
        """
        stored = features.detach().movedim(1, -1)
        if self.dtype == "float32":
            return stored.float().cpu().contiguous().view(len(features), self.elements).view(torch.uint8)
        raw = torch.empty(len(features), self.row_bytes, dtype=torch.uint8)
        if self.dtype == "uint8":
            self._quantize(stored, raw)
        else:
            values = raw.view(_FLOATS[self.dtype]).view(stored.shape).copy_(stored)
            if self.dtype == "float16":
                values.clamp_(-65504, 65504)
        return raw

    def decode(self, raw: Tensor) -> Tensor:
        """Turn bytes (B, row_bytes) into float32 features (B, *row_shape), channels-last, in new memory."""
        channels, *sizes = self.row_shape
        stored = torch.empty(len(raw), *sizes, channels)
        if self.dtype == "uint8":
            smallest, step, levels = self._parts(raw)
            stored.view(levels.shape).copy_(levels).mul_(step).add_(smallest)
        else:
            stored.copy_(raw.view(_FLOATS[self.dtype]).view(stored.shape))
        return stored.movedim(-1, 1)

    def _quantize(self, stored: Tensor, raw: Tensor) -> None:
        """Fill ``raw`` (B, row_bytes) from (B, ..., C), some rows at a time, so that temporaries stay near 1 MiB."""
        rows = max(1, _SLICE_BYTES // (4 * self.elements))
        for first in range(0, len(raw), rows):
            smallest, step, levels = self._parts(raw[first : first + rows])
            values = stored[first : first + rows].float().cpu().reshape(levels.shape)
            low, high = torch.aminmax(values, dim=1, keepdim=True)
            smallest.copy_(low)
            step.copy_((high - low) / 255)
            scale = torch.where(step > torch.finfo(torch.float32).tiny, 1 / step, 0)
            levels.copy_((values - low).mul_(scale).round_().clamp_(0, 255))

    def _parts(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """View uint8 rows: smallest values and steps, float32 (B, 1, R), and levels (B, values, R) of R ranges."""
        head = 8 * self.ranges
        floats = raw[:, :head].view(torch.float32)
        levels = raw[:, head : head + self.elements].view(len(raw), self.elements // self.ranges, self.ranges)
        return floats[:, None, : self.ranges], floats[:, None, self.ranges :], levels


def cache_bytes(rows: int, row_shape: tuple[int, ...], dtype: CacheDtype) -> int:
    """Bytes on disk of a cache of ``rows`` samples, labels included."""
    return rows * (RowFormat(row_shape, dtype).row_bytes + LABEL_BYTES)


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.rows", folder / f"{name}.json"


@dataclass(frozen=True)
class _Description:
    """The JSON file next to the rows."""

    format: int
    rows: int
    row_shape: tuple[int, ...]
    dtype: CacheDtype
    bytes: int


def _describe(rows: int, row_format: RowFormat) -> _Description:
    size = cache_bytes(rows, row_format.row_shape, row_format.dtype)
    return _Description(FORMAT, rows, row_format.row_shape, row_format.dtype, size)


class CacheWriter:
    """Writes a cache row by row; it is complete when :meth:`close` has written its description.

    An older cache of this name is replaced. As a context manager it removes an incomplete file at the end.

    Args:
        folder, name: its place; the folder is created if missing.
        rows: samples that will be written, over all views.
        row_shape: shape of one sample, ``(C, H, W)`` or ``(D,)``.
        dtype: stored type.
        storage_left: bytes that are left of the storage budget; None if it is unlimited.
        manifest: lists the complete cache, in a run.

    Raises:
        OutOfStorageError: the cache does not fit the storage budget or the disk.
    """

    def __init__(
        self,
        folder: Path | str,
        name: str,
        rows: int,
        row_shape: tuple[int, ...],
        *,
        dtype: CacheDtype,
        storage_left: int | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.folder, self.name, self.rows = Path(folder), name, rows
        self.format = RowFormat(tuple(row_shape), dtype)
        self.bytes = cache_bytes(rows, self.format.row_shape, dtype)
        self.written = 0
        self._labels = np.empty(rows, dtype=np.int64)
        self._path, sidecar = _paths(self.folder, name)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._manifest = manifest
        self._remove(sidecar, self._path)
        self._require_storage(storage_left)
        self._file: IO[bytes] = self._path.open("wb")
        self._digester = Digester(self._file)

    def write(self, features: Tensor, labels: Tensor) -> None:
        """Append features (B, *row_shape), float32 on any device, and their labels (B,), int64.

        Raises:
            OutOfStorageError: the disk is full; the unfinished file is removed.
        """
        end = self.written + len(features)
        if tuple(features.shape[1:]) != self.format.row_shape or end > self.rows:
            self.abort()
            raise UsageError(
                f"cache '{self.name}' takes {self.rows} rows of shape {self.format.row_shape}, "
                f"not a row {end} of shape {tuple(features.shape[1:])}."
            )
        self._labels[self.written : end] = labels.cpu().numpy()
        data = as_bytes(self.format.encode(features))
        with self._or_nothing():
            self._digester.write(data)
        self.written = end

    def close(self) -> ActivationCache:
        """Complete the file, write its description, and open it for reading.

        Raises:
            UsageError: fewer rows were written than announced.
            OutOfStorageError: the disk is full.
        """
        if self.written != self.rows:
            self.abort()
            raise UsageError(f"cache '{self.name}' was closed after {self.written} of its {self.rows} rows.")
        with self._or_nothing():
            self._digester.write(self._labels.view(np.uint8).data)
            sync_file(self._file)
            if self._manifest is not None:
                self._manifest.announce({self._path: self._digester.digest()})
            described = to_data(_describe(self.rows, self.format))
            write_json_atomic(_paths(self.folder, self.name)[1], described, self._manifest)
        self._file.close()
        return ActivationCache(self.folder, self.name, self.rows, self.format)

    def abort(self) -> None:
        """Remove the unfinished file."""
        if not self._file.closed:
            with contextlib.suppress(OSError):  # what is left to write goes with the file
                self._file.close()
            self._remove(self._path)

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _require_storage(self, storage_left: int | None) -> None:
        free = shutil.disk_usage(self.folder).free
        limits = {"the storage budget has": storage_left, f"{self.folder} has": free}
        for holder, left in limits.items():
            if left is not None and self.bytes > left:
                raise OutOfStorageError(
                    f"cache '{self.name}' needs {format_bytes(self.bytes)}, but {holder} {format_bytes(left)} left. "
                    "Allow more --storage, use a smaller --cache-dtype, or another --cache-dir."
                )

    @contextlib.contextmanager
    def _or_nothing(self) -> Iterator[None]:
        try:
            with storage_errors(self._path, self.bytes):
                yield
        except BaseException:
            self.abort()
            raise

    def _remove(self, *paths: Path) -> None:
        if self._manifest is not None:
            self._manifest.remove(paths)
        else:
            for path in paths:
                path.unlink(missing_ok=True)


class ActivationCache:
    """A complete cache on disk: ``rows`` samples over all views, and their labels, (rows,) int64."""

    def __init__(self, folder: Path, name: str, rows: int, row_format: RowFormat) -> None:
        self.folder, self.name, self.rows, self.format = folder, name, rows, row_format
        path, _ = _paths(folder, name)
        if path.stat().st_size != self.bytes:
            raise CheckpointError(
                f"cache {path} has {path.stat().st_size} bytes instead of {self.bytes}: it is damaged. "
                "Delete it; it will be written again."
            )
        self.labels = np.empty(rows, dtype=np.int64)
        self._fd = os.open(path, os.O_RDONLY)
        read_exactly(self._fd, [self.labels.view(np.uint8).data], rows * row_format.row_bytes)

    @classmethod
    def open(cls, folder: Path | str, name: str) -> ActivationCache | None:
        """Open a cache, None if there is none or it was never completed; raises CheckpointError if it is damaged."""
        path, sidecar = _paths(Path(folder), name)
        if not sidecar.is_file() or not path.is_file():
            return None
        described = read_data(_Description, sidecar, CheckpointError, "Delete it.")
        row_format = RowFormat(described.row_shape, described.dtype)
        if described != _describe(described.rows, row_format):
            raise CheckpointError(f"{sidecar} is of another format, or its sizes disagree. Delete it.")
        return cls(Path(folder), name, described.rows, row_format)

    @property
    def bytes(self) -> int:
        """Bytes on disk, labels included."""
        return cache_bytes(self.rows, self.format.row_shape, self.format.dtype)

    def read(self, indices: np.ndarray) -> Tensor:
        """Read rows: float32 (B, *row_shape), channels-last for feature maps."""
        raw = self.buffer(len(indices))
        self.read_raw(indices, raw)
        return self.format.decode(raw)

    def buffer(self, rows: int) -> Tensor:
        """Memory for the stored form of ``rows`` rows, uint8 (rows, row_bytes)."""
        return torch.empty(rows, self.format.row_bytes, dtype=torch.uint8)

    def read_raw(self, indices: np.ndarray, raw: Tensor) -> None:
        """Fill ``raw`` (B, row_bytes), uint8, with the stored rows of ``indices`` (B,), neighbours in one call.

        Raises:
            CheckpointError: the file is shorter than it was.
        """
        if len(indices) == 0:
            return
        order = np.argsort(indices, kind="stable")
        ordered = np.asarray(indices)[order]
        if ordered[0] < 0 or ordered[-1] >= self.rows:
            raise UsageError(f"cache '{self.name}' has rows 0 to {self.rows - 1}, not {ordered[0]} to {ordered[-1]}.")
        memory, size = as_bytes(raw), self.format.row_bytes
        for run in np.split(order, np.flatnonzero(np.diff(ordered) != 1) + 1):
            views = [memory[place * size : (place + 1) * size] for place in run.tolist()]
            read_exactly(self._fd, views, int(indices[run[0]]) * size)

    def close(self) -> None:
        """Close the file; the cache stays on disk."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
