"""What is fuzzed: every reader by name, as a function that reads all of a tree of files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz import run_readers
from snugfit._data import Decoder, Splits, load, load_boxed, super_classes, upright_size
from snugfit._data.decode import check_headers
from snugfit._data.labels_file import load_labelled
from snugfit.errors import DataError

_SIZE = 8
_MOST = 32
"""Images of a split that are read."""


def _read_splits(splits: Splits) -> None:
    """Read images and labels, and check that they are what is promised."""
    channels, side, _ = splits.image_shape
    for part in (splits.train, splits.val, splits.test):
        if part is None:
            continue
        count = min(len(part), _MOST)
        images = part.images(np.arange(count))
        assert images.shape == (count, channels, side, side), images.shape
        assert str(images.dtype) == "torch.uint8", images.dtype
        assert len(part.labels) == len(part)
        most = 2 if part.has_several_labels else len(splits.class_names)
        assert 0 <= part.labels.min() <= part.labels.max() < most
    splits.close()


def _named(name: str) -> Callable[[Path], None]:
    def read(root: Path) -> None:
        _read_splits(load(name, data_dir=root, image_size=_SIZE, val_fraction=0.3, workers=0))

    return read


def _folder(root: Path) -> None:
    _read_splits(load(f"folder:{root}", image_size=_SIZE, val_fraction=0.3, workers=0))


def _labels(root: Path) -> None:
    _read_splits(load_labelled(str(root), image_size=_SIZE, val_fraction=0.3, workers=0))


def _boxed(below: str = "") -> Callable[[Path], None]:
    def read(root: Path) -> None:
        splits: Any = load_boxed(str(root / below), image_size=32, val_fraction=0.3, workers=0)
        _read_splits(splits)
        for part in (splits.train, splits.val, splits.test):
            if part is None:
                continue
            targets = part.targets(np.arange(min(len(part), _MOST)))
            assert np.isfinite(targets).all()
            assert targets[..., 0].max(initial=0) < len(splits.class_names)
            assert (targets[..., 1:] >= 0).all() and (targets[..., 1:3] <= 1).all()

    return read


def _images(root: Path) -> None:
    """Every file alone, so that one that is refused does not hide the next."""
    decoder = Decoder(_SIZE, workers=0)
    for path in sorted(root.iterdir()):
        for use in (lambda path: check_headers([path]), upright_size, lambda path: decoder([path])):
            with contextlib.suppress(DataError):
                use(path)


def _cifar100(root: Path) -> None:
    with contextlib.suppress(DataError):
        super_classes("cifar100", root)
    _named("cifar100")(root)


READERS: dict[str, Callable[[Path], object]] = {
    "folder": _folder,
    "labels": _labels,
    "labels-columns": _labels,
    "images": _images,
    "yolo": _boxed(),
    "yolo-lists": _boxed("data.yaml"),
    "coco": _boxed(),
    "vww": _named("vww"),
    "mnist": _named("mnist"),
    "mnist-gz": _named("mnist"),
    "cifar10": _named("cifar10"),
    "cifar100": _cifar100,
    "tiny-imagenet": _named("tiny-imagenet"),
    "pets": _named("pets"),
    "cub200": _named("cub200"),
    "dogs": _named("dogs"),
    "flowers102": _named("flowers102"),
    **run_readers.READERS,
}
