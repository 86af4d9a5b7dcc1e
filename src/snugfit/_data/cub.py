"""Caltech-UCSD Birds-200-2011 (Wah et al., 2011, CNS-TR-2011-001): 200 kinds of birds, 5,994 and 5,794 photos."""

from __future__ import annotations

from pathlib import Path

from snugfit._data.listed import Listing, number, rows
from snugfit._data.sets import Parts
from snugfit.errors import DataError

MARKERS = ("train_test_split.txt", "image_class_labels.txt", "classes.txt")
_LARGEST_ID = 10**8


def read(root: Path, image_size: int, workers: int) -> Parts:
    """Read the images of ``CUB_200_2011/images.txt``, divided as in ``train_test_split.txt``.

    Photos are used whole: bounding boxes and parts are not read.

    Raises:
        DataError: a list or image is missing, the lists disagree or are malformed, or a file is not an image.
    """
    names = _class_names(root / "classes.txt")
    labels = _values(root / "image_class_labels.txt", 1, len(names))
    training = _values(root / "train_test_split.txt", 0, 1)
    listing, seen = Listing(root / "images", len(names)), set[int]()
    for place, (text, name) in rows(root / "images.txt", 2):
        image = number(text, 0, _LARGEST_ID, place)
        if image in seen:
            raise DataError(f"{place}: image {image} was listed before. Download the list again.")
        if image not in labels or image not in training:
            lacking = MARKERS[1] if image not in labels else MARKERS[0]
            raise DataError(f"{place}: {root / lacking} has no image {image}. Download the lists again.")
        seen.add(image)
        label = labels[image]
        listing.add("train" if training[image] else "test", name, str(label), names[label - 1], place)
    unlisted = (labels.keys() | training.keys()) - seen
    if unlisted:
        raise DataError(
            f"{root / 'images.txt'} has no image {min(unlisted)}, but the other lists do. Download it again."
        )
    return listing.parts(image_size, workers, names)


def _class_names(path: Path) -> tuple[str, ...]:
    """Names without their numbers, in the order of their labels."""
    names: list[str] = []
    for place, (text, name) in rows(path, 2):
        if number(text, 1, _LARGEST_ID, place) != len(names) + 1:
            raise DataError(f"{place}: class {text} is not the next one, {len(names) + 1}. Download the list again.")
        prefix, _, plain = name.partition(".")
        names.append(plain if plain and prefix.isdigit() else name)
    if len(names) < 2:
        raise DataError(f"{path} lists {len(names)} class(es); at least two are needed. Download it again.")
    return tuple(names)


def _values(path: Path, low: int, high: int) -> dict[int, int]:
    """A value for every image, by the number of the image."""
    values: dict[int, int] = {}
    for place, (text, value) in rows(path, 2):
        image = number(text, 0, _LARGEST_ID, place)
        if image in values:
            raise DataError(f"{place}: image {image} was listed before. Download the list again.")
        values[image] = number(value, low, high, place)
    return values
