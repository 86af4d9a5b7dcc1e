"""Sets of small images: the digits of scikit-learn, MNIST and Fashion-MNIST, and CIFAR.

Rows of the user's files are not memory-mapped: if a mapped file is truncated, reading it ends the process (SIGBUS).
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import math
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from snugfit._core.documents import open_regular
from snugfit._core.paths import cache_dir
from snugfit._data.files import lines
from snugfit._data.sets import MOST_RECORDS, ImageSet, Parts, Subset, check_labels, resized
from snugfit._data.split import stratified
from snugfit.errors import DataError, OutOfStorageError, is_out_of_storage

_CHUNK = 1 << 18
DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_UNPACKED_CHUNK = 1 << 18
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
_PACKING = 1 << 20
_LARGEST_SIDE, _LARGEST = 1 << 12, 1 << 31
_CIFAR_PIXELS = 3 * 32 * 32


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


@dataclass(frozen=True)
class CifarLayout:
    """File names and record layout of one CIFAR; the label is the last of ``label_bytes``."""

    train: tuple[str, ...]
    test: str
    names: str
    label_bytes: int
    classes: int


CIFAR10 = CifarLayout(tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "batches.meta.txt", 1, 10)
CIFAR100 = CifarLayout(("train.bin",), "test.bin", "fine_label_names.txt", 2, 100)


class DigitImages(ImageSet):
    """1,797 grey images, kept as 8 x 8 bytes and upsampled per batch."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, image_size: int) -> None:
        self._pixels, self.labels, self._size = pixels, labels, image_size

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> uint8 (B, 1, H, W)."""
        return resized(torch.from_numpy(self._pixels[indices]).unsqueeze(1), self._size)


def read_digits(folder: Path, image_size: int, _: int = 0) -> Parts:
    """Read the digits and divide them 80/10/10, always in the same way."""
    table = _digit_table()
    labels = table[:, 64].astype(np.int64)
    check_labels(labels, 10, "scikit-learn's digits")
    pixels = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    images = DigitImages(pixels, labels, image_size)
    train, val, test = (Subset(images, chosen) for chosen in stratified(labels, (0.1, 0.1), 0))
    return Parts(DIGITS, train, val, test)


def _digit_table() -> np.ndarray:
    # Importing scikit-learn costs tens of MB, so its bundled file is read without importing it.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError('the digits come with scikit-learn, which is missing. Install it: pip install "snugfit[demo]"')
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        from sklearn.datasets import load_digits

        digits = load_digits()
        return np.column_stack((digits.data, digits.target))
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.float32)


def read_mnist(class_names: tuple[str, ...], folder: Path, image_size: int, _: int = 0) -> Parts:
    """Open the training and test images, in IDX files (http://yann.lecun.com/exdb/mnist/), compressed or not."""
    train, test = (_mnist_part(folder, prefix, len(class_names), image_size) for prefix in ("train", "t10k"))
    return Parts(class_names, train, test=test, border=border_of(28, image_size))


def _mnist_part(folder: Path, prefix: str, classes: int, image_size: int) -> RecordImages:
    pixels_path, labels_path = (_existing(folder, f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    pixels, labels = _open_idx(pixels_path, 3), _open_idx(labels_path, 1).columns(0, 1)[:, 0].astype(np.int64)
    if len(pixels) != len(labels):
        raise DataError(f"{pixels_path} has {len(pixels)} images but {labels_path.name} {len(labels)} labels.")
    check_labels(labels, classes, labels_path)
    _, height, width = pixels.shape
    return RecordImages([pixels], labels, (1, height, width), image_size)


def _existing(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder / name}[.gz] is missing. Put all four original files into one folder.")


def _open_idx(path: Path, dimensions: int) -> Records:
    """Open an IDX file of unsigned bytes; a compressed one is unpacked once into the cache folder."""
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
                while size >= 0 and (chunk := packed.read(min(_UNPACKED_CHUNK, size + 1))):
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


def read_cifar(layout: CifarLayout, folder: Path, image_size: int, _: int = 0) -> Parts:
    """Open the training and test images, in the binary version (https://www.cs.toronto.edu/~kriz/cifar.html)."""
    names = _cifar_names(folder / layout.names, layout.classes)
    train, test = (cifar_images(folder, files, layout, image_size) for files in (layout.train, (layout.test,)))
    return Parts(names, train, test=test)


def cifar_images(folder: Path, files: tuple[str, ...], layout: CifarLayout, image_size: int) -> RecordImages:
    """Images in some of the files; only the rows of a batch are in memory."""
    opened, labels = [], []
    for path in (folder / name for name in files):
        opened.append(_open_cifar(path, layout.label_bytes))
        labels.append(opened[-1].columns(layout.label_bytes - 1, layout.label_bytes)[:, 0].astype(np.int64))
        check_labels(labels[-1], layout.classes, path)
    return RecordImages(opened, np.concatenate(labels), (3, 32, 32), image_size)


def cifar_super_classes(folder: Path) -> tuple[str, ...]:
    """Name of the super-class of each of CIFAR-100's classes, by label, from the first byte of its records."""
    path = folder / CIFAR100.test
    coarse, fine = _open_cifar(path, CIFAR100.label_bytes).columns(0, CIFAR100.label_bytes).astype(np.int64).T
    check_labels(coarse, 20, path)
    check_labels(fine, CIFAR100.classes, path)
    table = np.full(CIFAR100.classes, -1)
    table[fine] = coarse
    if (table < 0).any() or (table[fine] != coarse).any():
        raise DataError(f"{path} does not put every class into one super-class. Download it again.")
    names = _cifar_names(folder / "coarse_label_names.txt", 20)
    return tuple(names[label] for label in table)


def _open_cifar(path: Path, label_bytes: int) -> Records:
    record = label_bytes + _CIFAR_PIXELS
    if not path.is_file():
        raise DataError(f"{path} is missing. Unpack the whole of the original binary archive.")
    size = path.stat().st_size
    if size == 0 or size % record:
        raise DataError(
            f"{path} is truncated or no CIFAR file: {size} bytes are not a multiple of {record}. Download it again."
        )
    if size // record > MOST_RECORDS:
        raise DataError(f"{path} is not a CIFAR file: it has {size // record:,} records. Download it again.")
    return Records(path, 0, (size // record, record))


def _cifar_names(path: Path, classes: int) -> tuple[str, ...]:
    if not path.is_file():
        return tuple(str(label) for label in range(classes))
    names = tuple(name for line in lines(path) for name in line.split())
    if len(names) != classes:
        raise DataError(f"{path} names {len(names)} classes instead of {classes}. Download it again.")
    return names
