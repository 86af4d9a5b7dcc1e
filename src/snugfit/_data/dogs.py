"""Stanford Dogs (Khosla et al., FGVC at CVPR 2011): 120 breeds of ImageNet, 12,000 and 8,580 photos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from snugfit._data import folder
from snugfit._data.listed import Listing
from snugfit._data.matlab import read_vectors
from snugfit._data.sets import Parts
from snugfit.errors import DataError

_FIRST = "n02085620-Chihuahua"
_LISTS = ("train_list.mat", "test_list.mat")
MARKERS = (*_LISTS, f"Images/{_FIRST}", f"train/{_FIRST}")
_BREEDS = 120


def read(root: Path, image_size: int, workers: int) -> Parts:
    """Read ``Images/`` by the lists ``train_list.mat`` and ``test_list.mat``, or the folders ``train/`` and ``test/``.

    The folders, which need no lists, hold one folder per breed. Photos are used whole: bounding boxes are not read.

    Raises:
        DataError: a list or image is missing, a list is malformed, or a file is not an image.
    """
    if not any((root / name).exists() for name in (*_LISTS, "Images")):
        parts = folder.read(root, image_size, workers)
        return replace(parts, class_names=tuple(map(_breed, parts.class_names)))
    listing = Listing(root / "Images", _BREEDS)
    for part, name in zip(("train", "test"), _LISTS, strict=True):
        for number, (image, label) in enumerate(_entries(root / name), start=1):
            listing.add(part, image, label, _breed(image.partition("/")[0]), f"{root / name}, entry {number}")
    return listing.parts(image_size, workers)


def _breed(name: str) -> str:
    """``Chihuahua`` of ``n02085620-Chihuahua``."""
    return name.partition("-")[2] or name


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """Name and label of every image in a list."""
    if not path.is_file():
        raise DataError(
            f"{path} is missing. Unpack lists.tar in {path.parent}; "
            f"or let snugfit divide the images: --data folder:{path.parent / 'Images'}."
        )
    content = read_vectors(path, texts=["file_list"], numbers=["labels"])
    names, labels = content["file_list"], content["labels"]
    if len(names) != len(labels):
        raise DataError(f"{path} has {len(names)} names but {len(labels)} labels. Download it again.")
    yield from zip(names, labels, strict=True)
