"""Reading of lists that name the training and test images of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from snugfit._core.amounts import Sides
from snugfit._data.decode import Decoder, check_headers
from snugfit._data.files import FileNames, below, lines
from snugfit._data.folder import FileImages
from snugfit._data.sets import Parts
from snugfit.errors import DataError


def rows(path: Path, fields: int) -> Iterator[tuple[str, list[str]]]:
    """Lines of a text file, divided at white space into ``fields``, each with its file and line for messages.

    Empty lines and comments (``#``) are skipped.
    """
    if not path.exists():
        raise DataError(f"{path} is missing. Unpack the archive again.")
    for number, line in enumerate(lines(path), start=1):
        found = line.split()
        if not found or found[0].startswith("#"):
            continue
        if len(found) != fields:
            raise DataError(f"{path}, line {number}: '{line[:60]}' is not {fields} fields. Download it again.")
        yield f"{path}, line {number}", found


def number(text: str, low: int, high: int, place: str) -> int:
    """A whole number from ``low`` to ``high``; any other text is a ``DataError``."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
        raise DataError(f"{place}: '{text[:60]}' is not a number from {low} to {high}. Download the list again.")
    return int(text)


class Listing:
    """Image files below a folder in the order in which lists name them, with labels from 1 to ``highest``."""

    def __init__(self, folder: Path, highest: int, parts: tuple[str, ...] = ("train", "test")) -> None:
        self._folder, self._highest = folder, highest
        self._parts: dict[str, tuple[FileNames, list[int]]] = {part: (FileNames(), []) for part in parts}
        self._seen, self._classes = set[str](), dict[int, str]()

    def add(self, part: str, name: str, label: str, class_name: str, place: str) -> None:
        """Add an image to a part, with label and class name as the list has them at ``place``."""
        value, path = number(label, 1, self._highest, place), below(self._folder, name, place)
        if name in self._seen:
            raise DataError(f"{place}: {name} was listed before. Download the list again.")
        if self._classes.setdefault(value, class_name) != class_name:
            raise DataError(
                f"{place}: label {value} is for {class_name} and {self._classes[value]}. Download the list again."
            )
        if not path.is_file():
            raise DataError(f"{place}: {path} is missing. Unpack the archive of images again.")
        self._seen.add(name)
        files, labels = self._parts[part]
        files.append(path)
        labels.append(value - 1)

    def parts(self, image_size: Sides, workers: int, class_names: tuple[str, ...] = ()) -> Parts:
        """The parts; every file was opened once. Classes are those of the lists unless names are given."""
        for part, (files, _) in self._parts.items():
            if not len(files):
                raise DataError(f"the lists for {self._folder} have no {part} images. Download them again.")
            check_headers(files[index] for index in range(len(files)))
        decoder = Decoder(image_size, workers=workers)
        images = {
            part: FileImages(files, np.array(labels, dtype=np.int64), decoder)
            for part, (files, labels) in self._parts.items()
        }
        names = class_names or self._names()
        return Parts(names, images["train"], images.get("val"), images["test"], resources=(decoder,))

    def _names(self) -> tuple[str, ...]:
        names = [self._classes.get(label, "") for label in range(1, max(self._classes) + 1)]
        if "" in names:
            raise DataError(
                f"the lists for {self._folder} have no image of class {names.index('') + 1}. Download them again."
            )
        if len(names) < 2 or len(set(names)) < len(names):
            raise DataError(f"the lists for {self._folder} give one class several labels, or are of one class alone.")
        return tuple(names)
