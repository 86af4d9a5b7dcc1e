"""MNIST and Fashion-MNIST in IDX files (http://yann.lecun.com/exdb/mnist/), compressed or not."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from snugfit._core.paths import cache_dir
from snugfit._data.records import Records
from snugfit._data.sets import MOST_RECORDS, Parts, check_labels, resized
from snugfit.errors import DataError, OutOfStorageError, is_out_of_storage

DIGITS = tuple(str(digit) for digit in range(10))
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_CHUNK = 1 << 18
_BORDER = 2
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
_PACKING = 1 << 20
_LARGEST_SIDE, _LARGEST = 1 << 12, 1 << 31


class IdxImages:
    """Grey images in records of (h, w) bytes; only a batch's rows are in memory.

    28 x 28 images are padded with 2 black pixels on each side to 32 x 32, and resized to any other size.
    """

    def __init__(self, pixels: Records, labels: np.ndarray, image_size: int) -> None:
        self._pixels, self.labels, self._size = pixels, labels, image_size

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> uint8 (B, 1, H, W)."""
        batch = torch.from_numpy(self._pixels.rows(indices)).unsqueeze(1)
        if batch.shape[-1] == 28 and self._size == 32:
            return F.pad(batch, (_BORDER,) * 4)
        return resized(batch, self._size)


def read(folder: Path, class_names: tuple[str, ...], image_size: int) -> Parts:
    """Open the training and test files in ``folder``.

    Raises:
        DataError: a file is missing, corrupt or truncated, or a label is out of range.
    """
    train, test = (_read_part(folder, prefix, len(class_names), image_size) for prefix in ("train", "t10k"))
    return Parts(class_names, train, test=test, border=_BORDER if image_size == 32 else 0)


def _read_part(folder: Path, prefix: str, classes: int, image_size: int) -> IdxImages:
    pixels_path, labels_path = (_existing(folder, f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    pixels, labels = open_idx(pixels_path, 3), open_idx(labels_path, 1).columns(0, 1)[:, 0].astype(np.int64)
    if len(pixels) != len(labels):
        raise DataError(f"{pixels_path} has {len(pixels)} images but {labels_path.name} {len(labels)} labels.")
    check_labels(labels, classes, labels_path)
    return IdxImages(pixels, labels, image_size)


def _existing(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder / name}[.gz] is missing. Put all four original files into one folder.")


def open_idx(path: Path, dimensions: int) -> Records:
    """Open an IDX file of unsigned bytes; a compressed one is unpacked once into the cache folder.

    Raises:
        DataError: the file is corrupt, truncated or has another number of dimensions.
    """
    packed = path.suffix == ".gz"
    shape = _shape(path, dimensions, gzip.open if packed else open)
    start = 4 + 4 * dimensions
    raw = _unpacked(path, start + math.prod(shape)) if packed else path
    if raw.stat().st_size != start + math.prod(shape):
        raise DataError(f"{path} is truncated or too long: its header says {shape} bytes. Download it again.")
    return Records(raw, start, shape)


def _shape(path: Path, dimensions: int, opened: Callable[..., Any]) -> tuple[int, ...]:
    """Extents in the header of an IDX file: records first."""
    try:
        with opened(path, "rb") as file:
            start = file.read(4 + 4 * dimensions)
    except _DAMAGED as error:
        raise DataError(f"{path} is corrupt or truncated ({error}). Download it again.") from error
    if len(start) < 4 + 4 * dimensions or int.from_bytes(start[:4], "big") != 0x0800 + dimensions:
        raise DataError(f"{path} is not an IDX file of {dimensions}-dimensional unsigned bytes. Download it again.")
    records, *sides = struct.unpack(f">{dimensions}i", start[4:])
    if (
        not 0 < records <= MOST_RECORDS
        or not all(0 < side <= _LARGEST_SIDE for side in sides)
        or math.prod((records, *sides)) > _LARGEST
    ):
        raise DataError(f"{path}: its header says {(records, *sides)} bytes, which no images have. Download it again.")
    return (records, *sides)


def _unpacked(path: Path, size: int) -> Path:
    """The unpacked file; at most one byte more than ``size`` is read from the packed one."""
    status = path.stat()
    if status.st_size > size + _PACKING:  # zeros behind the end would all be read
        raise DataError(f"{path} is larger than its header says, even before it is unpacked. Download it again.")
    key = hashlib.sha1(f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}".encode()).hexdigest()[:12]
    target = cache_dir() / f"{path.stem}-{key}"
    if target.is_file():
        return target
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as part:
        try:
            with gzip.open(path) as packed:
                while size >= 0 and (chunk := packed.read(min(_CHUNK, size + 1))):
                    part.write(chunk)
                    size -= len(chunk)
            if size:
                raise DataError(f"{path} holds more or less than its header says. Download it again.")
            part.flush()
            Path(part.name).replace(target)
        except _DAMAGED as error:
            raise DataError(f"{path} is corrupt or truncated ({error}). Download it again.") from error
        except OSError as error:
            if is_out_of_storage(error):
                raise OutOfStorageError(f"no space left in {target.parent} to unpack {path}. Free some.") from error
            raise
        finally:
            Path(part.name).unlink(missing_ok=True)
    return target
