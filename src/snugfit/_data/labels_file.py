"""Image files with several labels each, which a ``labels.csv`` lists."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from snugfit._core.amounts import Sides, height_and_width
from snugfit._core.functions import is_function
from snugfit._core.hardware import decoding_threads
from snugfit._core.options import from_keywords
from snugfit._core.paths import data_root, expanded
from snugfit._data.decode import Decoder, check_headers
from snugfit._data.files import FileNames, below, check_disjoint, lines, opening
from snugfit._data.folder import CHECKED_FILES, VALIDATION, FileImages
from snugfit._data.own import load_function
from snugfit._data.sets import IMAGENET, Parts, Splits, check_class_count
from snugfit._data.split import SplitOptions, assemble
from snugfit.errors import DataError

LABELS_FILE = "labels.csv"
IMAGE_SIZE = 224
_FORM = f"{LABELS_FILE} has a line 'file,labels', and then lines like 'a.jpg,cat;dog'"
_YES, _NO = ("1", "1.0", "True", "true"), ("0", "0.0", "False", "false", "")


class _Listed:
    """Files of one part with numbers of classes; ``names`` are all classes, to which new ones are added."""

    def __init__(self, folder: Path, names: dict[str, int]) -> None:
        self.files, self._rows, self._classes = FileNames(), array("q"), array("q")
        seen = set[str]()
        for place, name, labels in _rows(folder / LABELS_FILE, names):
            path = below(folder, name, place)
            if name in seen:
                raise DataError(f"{place}: {name} was listed before. Write all its labels into one line.")
            if not path.is_file():
                raise DataError(f"{place}: {path} is missing. Name images relative to {folder}.")
            seen.add(name)
            self._rows.extend([len(self.files)] * len(labels))
            self._classes.extend(names.setdefault(label, len(names)) for label in labels)
            self.files.append(path)
        if not seen:
            raise DataError(f"{folder / LABELS_FILE} lists no images; {_FORM}.")
        if len(seen) <= CHECKED_FILES:
            check_headers(self.files[index] for index in range(len(self.files)))

    def images(self, places: np.ndarray, decoder: Decoder) -> FileImages:
        """The images; ``places`` (classes,) are the places of the classes by their numbers."""
        labels = np.zeros((len(self.files), len(places)), np.uint8)
        labels[np.asarray(self._rows, np.int64), places[np.asarray(self._classes, np.int64)]] = 1
        return FileImages(self.files, labels, decoder)


def _rows(path: Path, names: dict[str, int]) -> Iterator[tuple[str, str, list[str]]]:
    """Place, file and labels of each line; classes that are columns are added to ``names`` in their order."""
    reader = csv.reader(lines(path))
    try:
        head = [each.strip() for each in next(reader, [])]
        if len(head) < 2 or "" in head or len(set(head)) < len(head):
            raise DataError(f"{path} begins with '{','.join(head)[:60]}'. {_FORM}, or a column for each class.")
        if (path.parent / head[0]).is_file():
            raise DataError(f"{path} begins with an image, and has no line with the names of its columns. {_FORM}.")
        lists = len(head) == 2 and not _is_class(path)
        for label in () if lists else head[1:]:
            names.setdefault(label, len(names))
        for number, row in enumerate(reader, start=2):
            if not any(row):
                continue
            place = f"{path}, line {number}"
            if len(row) != len(head):
                raise DataError(f"{place}: there are {len(row)} columns, but the first line has {len(head)}.")
            yield place, row[0].strip(), _listed(row) if lists else _marked(head, row, place)
    except csv.Error as error:
        raise DataError(f"{path} cannot be read: {error}. {_FORM}.") from error


def _is_class(path: Path) -> bool:
    """Whether the only column besides the file's has 0 or 1 for every image, and is not called ``labels``."""
    reader = csv.reader(lines(path))
    if next(reader)[1].strip().lower() == "labels":
        return False
    return all(len(row) == 2 and row[1].strip() in ("0", "1") for row in reader if any(row))


def _listed(row: list[str]) -> list[str]:
    """The labels of a line whose only other column lists them."""
    return list(dict.fromkeys(label.strip() for label in row[1].split(";") if label.strip()))


def _marked(head: list[str], row: list[str], place: str) -> list[str]:
    """The labels of a line: the columns with a 1."""
    values = [value.strip() for value in row[1:]]
    wrong = next((value for value in values if value not in _YES + _NO), None)
    if wrong is not None:
        raise DataError(f"{place}: '{wrong[:60]}' is neither 0 nor 1. With several columns, each is a class.")
    return [label for label, value in zip(head[1:], values, strict=True) if value in _YES]


def read(root: Path, image_size: Sides, workers: int) -> Parts:
    """List the images under ``root``; nothing is decoded yet.

    There is one ``labels.csv``, or one in each of ``train``, ``val`` and ``test``; as in folders of classes, a single
    one of the latter two is the test part.
    """
    names: dict[str, int] = {}
    folders = {part: folder for part in ("train", "val", "test") if (folder := _part(root, part))}
    if "train" not in folders and not (root / LABELS_FILE).is_file():
        raise DataError(f"{root} has no {LABELS_FILE}, and no train/{LABELS_FILE}. {_FORM}.")
    listed = {
        part: _Listed(folder, names) for part, folder in (folders if "train" in folders else {"train": root}).items()
    }
    if not names:
        raise DataError(f"{root}: no image has a label. {_FORM}.")
    check_class_count(len(names), root)
    ordered = sorted(names)
    places = np.array([ordered.index(name) for name in names])
    check_disjoint(*(part.files for part in listed.values()))
    decoder = Decoder(image_size, 3, workers)
    sets = {part: each.images(places, decoder) for part, each in listed.items()}
    if "test" in sets or "val" not in sets:
        return Parts(tuple(ordered), sets["train"], sets.get("val"), sets.get("test"), (decoder,))
    return Parts(tuple(ordered), sets["train"], test=sets["val"], resources=(decoder,))


def _part(root: Path, part: str) -> Path | None:
    named = VALIDATION if part == "val" else (part,)
    return next((root / name for name in named if (root / name / LABELS_FILE).is_file()), None)


def labels_path(name: str, data_dir: str | Path | None = None) -> Path:
    """Resolve the name of a folder with a ``labels.csv``, or of that file: as given, or below the data folder."""
    plain = expanded(name.removeprefix("folder:"))
    if plain.name == LABELS_FILE:
        plain = plain.parent
    if plain.is_dir():
        return plain
    if not plain.is_absolute() and (found := data_root(data_dir) / plain).is_dir():
        return found
    raise DataError(f"'{name}' does not exist. --task multi-label takes a folder of images with a {LABELS_FILE}.")


def load_labelled(
    name: str, *, data_dir: str | Path | None = None, workers: int | str = "auto", **options: Any
) -> Splits:
    """Open images with several labels each; they stay on disk until they are read.

    Missing splits are made as by :func:`snugfit._data.load`; there, an image counts to its rarest label.

    Args:
        name: a folder with a ``labels.csv``, ``folder:`` before it is allowed; or the user's own ``module:function``.
        data_dir: folder in which a name that is not a path is searched; ``SNUGFIT_DATA`` otherwise.
        workers: threads that decode image files; ``"auto"`` takes one for each core, 2 at least and 8 at most.
        **options: fields of :class:`snugfit._data.split.SplitOptions`; images have 224 pixels by default.

    Raises:
        UnknownNameError: there is no such option.
        UsageError: a number makes no sense.
        DataError: there is no such data, it is damaged, or has another number of classes.
    """
    if is_function(name):
        return load_function(name, **options)
    chosen = from_keywords(SplitOptions, options)
    size = chosen.sides or IMAGE_SIZE
    with opening(name):
        parts = read(labels_path(name, data_dir), size, decoding_threads(workers))
    mean, std = IMAGENET
    return assemble(name, parts, chosen, image_shape=(3, *height_and_width(size)), mean=mean, std=std, flip=True)
