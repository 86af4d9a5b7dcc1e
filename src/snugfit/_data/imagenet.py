"""Subsets of ImageNet in their original layouts: Tiny ImageNet and Imagenette."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from snugfit._data import folder as class_folder
from snugfit._data.decode import Decoder
from snugfit._data.files import FileNames, below, check_regular, lines
from snugfit._data.sets import Parts
from snugfit.errors import DataError

_IMAGENETTE_NAMES = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}


def read_imagenette(root: Path, image_size: int, workers: int) -> Parts:
    """Read ``imagenette2*/train|val/n*/``; ``val`` serves as test set.

    Raises:
        DataError: as for any image folder.
    """
    parts = class_folder.read(root, image_size, workers)
    return replace(parts, class_names=tuple(_IMAGENETTE_NAMES.get(name, name) for name in parts.class_names))


def read_tiny_imagenet(root: Path, image_size: int, workers: int) -> Parts:
    """Read ``tiny-imagenet-200/``; its test images have no labels, so its ``val`` serves as test set.

    Raises:
        DataError: a listed file is missing, or an annotation cannot be understood.
    """
    names = tuple(sorted(name for line in lines(root / "wnids.txt") for name in line.split()))
    for name in names:
        if not below(root / "train", name, str(root / "wnids.txt")).is_dir():
            raise DataError(f"{root / 'train' / name} is missing, but wnids.txt lists it. Unpack the archive again.")
    decoder = Decoder(image_size, workers=workers)
    train = class_folder.class_images(root / "train", names, decoder, [])
    return Parts(names, train, test=_annotated(root / "val", names, decoder), resources=(decoder,))


def _annotated(folder: Path, names: Sequence[str], decoder: Decoder) -> class_folder.FileImages:
    annotations = folder / "val_annotations.txt"
    if not annotations.is_file():
        raise DataError(f"{annotations} is missing. Unpack the archive again.")
    files, labels = FileNames(), []
    numbers = {name: number for number, name in enumerate(names)}
    for number, line in enumerate(lines(annotations), start=1):
        fields, place = line.split("\t"), f"{annotations}, line {number}"
        if len(fields) < 2 or fields[1] not in numbers:
            raise DataError(f"{place}: no known class in '{line[:60]}'.")
        file = below(folder / "images", fields[0], place)
        check_regular(file)
        files.append(file)
        labels.append(numbers[fields[1]])
    if not labels:
        raise DataError(f"{annotations} is empty. Unpack the archive again.")
    return class_folder.FileImages(files, np.array(labels, dtype=np.int64), decoder)
