"""Objects that COCO annotates in ``instances_*.json`` (https://cocodataset.org/#format-data), and their boxes.

Crowds are left out, as they are when detectors are trained on COCO. Classes are the categories in the order of their
ids. A file of hundreds of MB is never in memory as a whole: the standard library decodes only whole texts, so
:func:`entries` finds the entries of its lists and decodes one at a time.
"""

from __future__ import annotations

import json
import reprlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from snugfit._data.boxes import BoxChecks, BoxedData, BoxedImages, Boxes, BoxTable
from snugfit._data.decode import Decoder
from snugfit._data.files import FileNames, below, check_regular
from snugfit._data.sets import check_class_count
from snugfit.errors import DataError

_LARGEST = 1e15
ROBOFLOW = "_annotations.coco.json"
_BOX_PARTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_CHUNK = 1 << 18
_LONGEST = 1 << 22
_SPACE = " \t\n\r"
_AFTER_A_VALUE = ",:]}" + _SPACE
_DECODER = json.JSONDecoder()


def find_boxes(root: Path) -> dict[str, tuple[Path, Path]]:
    """The file of annotations and the folder of images of each part below a folder; empty if there are none.

    Looked for are ``annotations/instances_train2017.json`` (any year, or none) with ``train2017/`` or
    ``images/train2017/``, and ``train/_annotations.coco.json``; the same for val and test.
    """
    found = {}
    for part, names in _BOX_PARTS.items():
        for name in names:
            if (root / name / ROBOFLOW).is_file():
                found[part] = (root / name / ROBOFLOW, root / name)
            for path in sorted((root / "annotations").glob(f"instances_{name}*.json")):
                found[part] = (path, images_of(path, root))
    return found


def images_of(path: Path, root: Path) -> Path:
    """The folder of the images that a file of annotations lists."""
    name = path.stem.removeprefix("instances_")
    folders = [root / name, root / "images" / name, root / "images", path.parent]
    return next((folder for folder in folders if folder.is_dir()), root)


def number(value: Any, least: float = -_LARGEST, most: float = _LARGEST) -> float:
    """A number between two; anything else raises a ``TypeError`` or ``ValueError``, as in the next two functions."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(value)
    if not least <= value <= most:
        raise ValueError(value)
    return float(value)


def identity(value: Any) -> int:
    """A whole number that 64 bits hold."""
    if type(value) is not int:
        raise TypeError(value)
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(value)
    return value


def _text(value: Any) -> str:
    """A text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise TypeError(value)
    value.encode()
    return value


class Instances:
    """Images, annotations and categories of one file, in columns; it is read entry by entry."""

    advice = "Restore the images of {folder}."

    def __init__(self, path: Path, folder: Path, files: FileNames) -> None:
        self.path, self.folder, self.files = path, folder, files
        self.ids, self.sizes = array("q"), array("d")
        self.image_ids, self.category_ids, self.values = array("q"), array("q"), array("d")
        self.categories: dict[int, str] = {}

    def read(self) -> None:
        """Read the file."""
        add = {"images": self._add_image, "annotations": self.add_annotation, "categories": self._add_category}
        for name, entry in entries(self.path):
            if not isinstance(name, str) or name not in add:
                continue
            try:
                if not isinstance(entry, dict):
                    raise TypeError(entry)
                add[name](entry)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                shown = reprlib.repr(entry)
                raise DataError(
                    f"{self.path}: '{name}' holds {shown}, which is not an entry of COCO. Restore it."
                ) from error

    def _add_image(self, entry: dict[str, Any]) -> None:
        file = below(self.folder, _text(entry["file_name"]), str(self.path))
        width, height = number(entry["width"], 1), number(entry["height"], 1)
        self.ids.append(identity(entry["id"]))
        if not file.is_file():
            advice = self.advice.format(folder=self.folder, name=self.folder.name)
            raise DataError(f"{file} is missing, but {self.path} lists it. {advice}")
        self.sizes.extend((width, height))
        self.files.append(file)

    def add_annotation(self, entry: dict[str, Any]) -> None:
        """Add the image and category of an annotation; subclasses add values."""
        self.image_ids.append(identity(entry["image_id"]))
        self.category_ids.append(identity(entry["category_id"]))

    def _add_category(self, entry: dict[str, Any]) -> None:
        self.categories[identity(entry["id"])] = _text(entry["name"])

    def annotated(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the images (N,), and the positions among them of the annotations' images (M,); both int64."""
        ids, annotated = np.array(self.ids, dtype=np.int64), np.frombuffer(self.image_ids, dtype=np.int64)
        check_ids(ids, self.path)
        order = np.argsort(ids, kind="stable")
        places: np.ndarray = order[np.searchsorted(ids, annotated, sorter=order).clip(max=len(ids) - 1)]
        unknown = annotated[ids[places] != annotated]
        if len(unknown):
            raise DataError(f"{self.path} annotates an image {unknown[0]} that it does not list. Restore it.")
        return ids, places


class _BoxInstances(Instances):
    """A file with the boxes of its annotations."""

    def __init__(self, path: Path, folder: Path, checks: BoxChecks) -> None:
        super().__init__(path, folder, FileNames())
        self._checks = checks
        self.read()
        if not len(self.files) or not self.categories:
            raise DataError(f"{path} has no {'categories' if len(self.files) else 'images'}: not COCO's instances.")
        check_class_count(len(self.categories), path)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.categories[number] for number in sorted(self.categories))

    def add_annotation(self, entry: dict[str, Any]) -> None:
        if entry.get("iscrowd"):
            self._checks.count("crowds were left out")
            return
        left, top, width, height = map(number, entry["bbox"])
        super().add_annotation(entry)
        self.values.extend((left, top, width, height))

    def boxes(self) -> Boxes:
        """The boxes by image, in the order of the images."""
        ids, images = self.annotated()
        labels = {number: label for label, number in enumerate(sorted(self.categories))}
        table, by_image = BoxTable(), np.argsort(images, kind="stable")
        ends = np.searchsorted(images[by_image], np.arange(len(ids)), side="right")
        start = 0
        for image, end in enumerate(ends.tolist()):
            rows = [self._row(place, image, labels) for place in by_image[start:end].tolist()]
            table.add(self._checks.rows(rows, f"{self.path}, image {ids[image]}"))
            start = end
        return table.boxes()

    def _row(self, place: int, image: int, labels: dict[int, int]) -> tuple[float, float, float, float, float]:
        category = self.category_ids[place]
        if category not in labels:
            raise DataError(f"{self.path} annotates an object of category {category}, which it does not list.")
        left, top, width, height = self.values[4 * place : 4 * place + 4]
        across, down = self.sizes[2 * image : 2 * image + 2]
        return (labels[category], (left + width / 2) / across, (top + height / 2) / down, width / across, height / down)


def read_boxes(found: dict[str, tuple[Path, Path]], image_size: int, workers: int) -> BoxedData:
    """Read the parts; images are not decoded yet."""
    checks, decoder = BoxChecks(), Decoder(image_size, workers=workers, crop=False)
    parts, names = {}, tuple[str, ...]()
    for part, (path, folder) in found.items():
        instances = _BoxInstances(path, folder, checks)
        parts[part] = BoxedImages(instances.files, instances.boxes(), decoder)
        if part != "train" and instances.class_names != names:
            raise DataError(f"{path} has other categories than {found['train'][0]}. Give all parts the same ones.")
        names = instances.class_names
    if not len(parts["train"].boxes.rows):
        raise DataError(f"{found['train'][0]} holds no boxes to train on.")
    return names, parts, decoder, checks


def check_ids(ids: np.ndarray, source: Path) -> None:
    """Check that no id (N,) occurs twice."""
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise DataError(f"{source}: image {twice[0]} is listed twice. Restore the original files.")


def entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Read a JSON object, and give each entry of its lists with the list's name, in the order of the file.

    Members that are not lists are skipped. About a MB is in memory at a time, or one entry if it is larger.
    """
    check_regular(path)
    try:
        with path.open(encoding="utf-8") as file:
            yield from _Scanner(file).lists()
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}. Restore it.") from error


class _Scanner:
    """A window that moves forward over a text."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._window, self._at = "", 0
        self._passed = 0  # characters before the window

    def lists(self) -> Iterator[tuple[str, Any]]:
        """Names and entries of the lists in the object that the text is."""
        separator = self._take("{")
        if self._next() == "}":
            separator = self._take("}")
        while separator != "}":
            name = self._value()
            self._take(":")
            if self._next() == "[":
                for entry in self._list():
                    yield name, entry
            else:
                self._value()
            separator = self._take(",}")
        if self._next():
            raise ValueError(f"more follows the object that ends at {self._place()}")

    def _list(self) -> Iterator[Any]:
        separator = self._take("[")
        if self._next() == "]":
            separator = self._take("]")
        while separator != "]":
            yield self._value()
            separator = self._take(",]")

    def _value(self) -> Any:
        """Decode the next value; the character after it shows that it is complete."""
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._window, self._at)
            except json.JSONDecodeError:
                value, end = None, len(self._window)
            if end < len(self._window) and self._window[end] in _AFTER_A_VALUE:
                self._at = end
                return value
            if not self._read_on():
                raise ValueError(f"a value is wrong or breaks off at {self._place()}")

    def _take(self, expected: str) -> str:
        """Consume the next character, which must be an expected one."""
        found = self._next()
        if not found or found not in expected:
            wanted = " or ".join(f"'{character}'" for character in expected)
            raise ValueError(f"expected {wanted} at {self._place()}" + ("" if found else ", the end of the file"))
        self._at += 1
        return found

    def _next(self) -> str:
        """The next character other than white space; empty at the end of the text."""
        while True:
            while self._at < len(self._window) and self._window[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._window) or not self._read_on():
                return self._window[self._at : self._at + 1]

    def _read_on(self) -> bool:
        """Drop the text before the position and double the rest; False at the end of the text."""
        ahead = len(self._window) - self._at
        if ahead > _LONGEST:
            raise ValueError(f"the entry at {self._place()} is wrong, or longer than {_LONGEST:,} characters")
        more = self._file.read(max(_CHUNK, ahead))
        self._passed += self._at
        self._window, self._at = self._window[self._at :] + more, 0
        return bool(more)

    def _place(self) -> str:
        return f"character {self._passed + self._at + 1:,}"
