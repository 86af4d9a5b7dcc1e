"""CIFAR-10 and CIFAR-100, binary version: records of fixed size (https://www.cs.toronto.edu/~kriz/cifar.html)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from snugfit._data.files import lines
from snugfit._data.records import Records
from snugfit._data.sets import MOST_RECORDS, Parts, check_labels, resized
from snugfit.errors import DataError

_PIXELS = 3 * 32 * 32
_SUPER_CLASSES = 20


@dataclass(frozen=True)
class Layout:
    """File names and record layout of one CIFAR; the label is the last of ``label_bytes``."""

    train: tuple[str, ...]
    test: str
    names: str
    label_bytes: int
    classes: int


CIFAR10 = Layout(tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "batches.meta.txt", 1, 10)
CIFAR100 = Layout(("train.bin",), "test.bin", "fine_label_names.txt", 2, 100)


class RecordImages:
    """Images in binary record files; only the rows of a batch are in memory."""

    def __init__(self, files: list[Path], label_bytes: int, classes: int, image_size: int) -> None:
        self._label_bytes, self._size = label_bytes, image_size
        self._files = [_open_records(path, label_bytes) for path in files]
        self._starts = np.cumsum([0] + [len(records) for records in self._files])
        labels = [each.columns(label_bytes - 1, label_bytes)[:, 0].astype(np.int64) for each in self._files]
        for path, part in zip(files, labels, strict=True):
            check_labels(part, classes, path)
        self.labels = np.concatenate(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> uint8 (B, 3, H, W)."""
        pixels = np.empty((len(indices), _PIXELS), dtype=np.uint8)
        owner = np.searchsorted(self._starts, indices, side="right") - 1
        for file in np.unique(owner):
            rows = owner == file
            pixels[rows] = self._files[file].rows(indices[rows] - self._starts[file])[:, self._label_bytes :]
        return resized(torch.from_numpy(pixels).view(-1, 3, 32, 32), self._size)


def read(folder: Path, layout: Layout, image_size: int) -> Parts:
    """Open the training and test files in ``folder``.

    Raises:
        DataError: a file is missing or truncated, or a label is out of range.
    """
    names = _class_names(folder / layout.names, layout.classes)
    train = RecordImages([folder / n for n in layout.train], layout.label_bytes, layout.classes, image_size)
    test = RecordImages([folder / layout.test], layout.label_bytes, layout.classes, image_size)
    return Parts(names, train, test=test)


def super_classes(folder: Path) -> tuple[str, ...]:
    """Name of the super-class of each of CIFAR-100's classes, by label, from the first byte of its records.

    Raises:
        DataError: the test file is missing or truncated, lacks a class, or puts one into two super-classes.
    """
    path = folder / CIFAR100.test
    coarse, fine = _open_records(path, CIFAR100.label_bytes).columns(0, CIFAR100.label_bytes).astype(np.int64).T
    check_labels(coarse, _SUPER_CLASSES, path)
    check_labels(fine, CIFAR100.classes, path)
    table = np.full(CIFAR100.classes, -1)
    table[fine] = coarse
    if (table < 0).any() or (table[fine] != coarse).any():
        raise DataError(f"{path} does not put every class into one super-class. Download it again.")
    names = _class_names(folder / "coarse_label_names.txt", _SUPER_CLASSES)
    return tuple(names[label] for label in table)


def _open_records(path: Path, label_bytes: int) -> Records:
    record = label_bytes + _PIXELS
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


def _class_names(path: Path, classes: int) -> tuple[str, ...]:
    if not path.is_file():
        return tuple(str(label) for label in range(classes))
    names = tuple(name for line in lines(path) for name in line.split())
    if len(names) != classes:
        raise DataError(f"{path} names {len(names)} classes instead of {classes}. Download it again.")
    return names
