"""Boxes in YOLO's format: an image has a text file of labels of the same name, ``class x y width height`` a line.

Centre and size are fractions of the image's sides. A line of more numbers is an outline (x y x y ...), whose bounding
box counts. Labels of ``.../images/a.jpg`` are in ``.../labels/a.txt``; an image without such a file has no objects.

Where the parts are comes from ``data.yaml`` (``path``, ``train``, ``val``, ``test``: folders, lists of image files, or
several of either) if there is one, otherwise from the folders: ``images/train`` or ``train/images``, or ``images``
alone.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from snugfit._core.paths import expanded
from snugfit._core.yaml_text import read_yaml
from snugfit._data.boxes import BoxChecks, BoxedData, BoxedImages, BoxTable, Row
from snugfit._data.decode import Decoder, check_headers, image_files
from snugfit._data.files import LONGEST_NAME, FileNames, check_disjoint, check_regular, lines
from snugfit._data.sets import MOST_CLASSES, check_class_count
from snugfit.errors import DataError

_FOLDERS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
_CHECKED_FILES = 20_000
LARGEST_LABELS = 1 << 24
"""Bytes of the labels of one image."""


class YoloFolder:
    """A folder of images and labels, or a ``data.yaml`` that says where they are; ``links`` to images are collected."""

    def __init__(self, path: Path) -> None:
        self.links: list[Path] = []
        if not path.is_dir():
            check_regular(path)
        file = _settings_file(path)
        self.root, self._settings = (path if path.is_dir() else path.parent), {}
        if file is not None:
            self._settings = _read_settings(file)
            self.root = _below(file.parent, self._settings.get("path"))
            if not self.root.is_dir():
                self.root = file.parent

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names by label, from ``data.yaml`` or ``classes.txt``; None if there is neither."""
        named, listed = self._settings.get("names"), self.root / "classes.txt"
        if named is None and "nc" in self._settings:
            return tuple(str(label) for label in range(self._settings["nc"]))
        if named is None and listed.is_file():
            named = [line for line in lines(listed) if line]
        return None if named is None else tuple(map(str, named))

    def parts(self) -> dict[str, list[Path]]:
        """Image files of each existing part, sorted."""
        found = {part: self._part(part, names) for part, names in _FOLDERS.items()}
        if not found["train"]:
            found["train"] = self._images_below(self.root / "images")
        if not found["train"]:
            raise DataError(
                f"{self.root} holds no training images: looked for images/train, train/images and images, with labels "
                "in labels/train, train/labels and labels."
            )
        return {part: files for part, files in found.items() if files}

    def _part(self, part: str, names: Sequence[str]) -> list[Path]:
        if any(name in self._settings for name in _FOLDERS):
            named = self._settings.get(part) or []
            return [file for each in named for file in self._listed(each)]
        folders = [folder for name in names for folder in (self.root / "images" / name, self.root / name / "images")]
        return next((self._images_below(folder) for folder in folders if folder.is_dir()), [])

    def _listed(self, name: str) -> list[Path]:
        """Images of a folder or of a list that ``data.yaml`` names."""
        options = [_below(self.root, name), _below(self.root, name.removeprefix("../"))]  # Roboflow's are one too high
        place = next((option for option in options if option.exists()), None)
        if place is None:
            raise DataError(f"{options[0]} is missing, but data.yaml names it. Correct its path, train, val and test.")
        if place.is_dir():
            inner = place / "images"
            return self._images_below(inner if inner.is_dir() else place)
        files = [_below(place.parent, line) for line in lines(place) if line]
        for file in files:
            if not file.is_file():
                raise DataError(f"{file} is missing, but {place} lists it. Restore it or remove the line.")
        return sorted(files)

    def _images_below(self, folder: Path) -> list[Path]:
        return image_files(folder, self.links) if folder.is_dir() else []


def read_boxes(path: Path, image_size: int, workers: int) -> BoxedData:
    """Read a folder in YOLO's format; images are not decoded yet, but up to 20,000 headers are checked."""
    folder, checks, decoder = YoloFolder(path), BoxChecks(), Decoder(image_size, workers=workers, crop=False)
    names, highest = folder.class_names, -1
    parts = {}
    for part, files in folder.parts().items():
        table, kept = BoxTable(), FileNames()
        for file in files:
            rows = _rows(file, names, checks)
            highest = max([highest, *(int(row[0]) for row in rows)])
            table.add(rows)
            kept.append(file)
        if len(kept) <= _CHECKED_FILES:
            check_headers(files)
        _count_lost_labels(files, checks)
        parts[part] = BoxedImages(kept, table.boxes(), decoder)
    if folder.links:
        check_disjoint(*(images.files for images in parts.values()))
    if not len(parts["train"].boxes.rows):
        raise DataError(
            f"the labels of {folder.root} hold no boxes to train on. Labels of images/a.jpg must be in labels/a.txt, a "
            "line for each box: class, centre x, centre y, width, height."
        )
    return names or tuple(str(label) for label in range(highest + 1)), parts, decoder, checks


def label_file(image: Path) -> Path:
    """File of an image's labels: in ``labels`` instead of the last ``images`` of its path."""
    parts = list(image.parts)
    for place in range(len(parts) - 2, -1, -1):
        if parts[place] == "images":
            parts[place] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _rows(image: Path, names: tuple[str, ...] | None, checks: BoxChecks) -> list[Row]:
    path = label_file(image)
    if not path.exists():
        checks.count("images have no file of labels and count as images without objects")
        return []
    numbered = enumerate(lines(path, LARGEST_LABELS), start=1)
    return checks.rows([row_of(line, f"{path}, line {number}", names) for number, line in numbered if line], str(path))


def row_of(line: str, place: str, names: tuple[str, ...] | None) -> Row:
    """One line of labels: a class and a box, or a class and an outline."""
    try:
        label, *values = (float(text) for text in line.split())
    except ValueError:
        label, values = -1.0, []
    if not label.is_integer() or label < 0 or not (len(values) == 4 or (len(values) >= 6 and len(values) % 2 == 0)):
        raise DataError(
            f"{place}: '{line[:60]}' is not a label. Write a class number and centre x, centre y, width and "
            "height as fractions of the image's sides: 0 0.5 0.5 0.2 0.3."
        )
    check_class_count(int(label) + 1, place)
    if names is not None and label >= len(names):
        raise DataError(f"{place}: there is no class {int(label)}; classes go from 0 to {len(names) - 1}.")
    if len(values) > 4:
        across, down = values[::2], values[1::2]
        left, right, top, bottom = min(across), max(across), min(down), max(down)
        values = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
    x, y, width, height = values
    return label, x, y, width, height


def _count_lost_labels(files: Sequence[Path], checks: BoxChecks) -> None:
    """Count files of labels without an image."""
    known = {label_file(file) for file in files}
    for folder in {file.parent for file in known}:
        for path in folder.glob("*.txt") if folder.is_dir() else ():
            if path not in known and path.name != "classes.txt":
                checks.count("files of labels have no image and were left out")


def _settings_file(path: Path) -> Path | None:
    if path.is_file():
        return path
    found = [path / "data.yaml", path / "data.yml", path / "dataset.yaml"]
    return next((file for file in found if file.exists()), None)


def _below(folder: Path, name: str | None) -> Path:
    if name is not None and (len(name) > LONGEST_NAME or "\0" in name):
        raise DataError(f"{folder}: {reprlib.repr(name)} is not a name of a file or folder. Correct it.")
    return folder if name is None else folder / expanded(name)


def _read_settings(file: Path) -> dict[str, Any]:
    """Read the keys of a ``data.yaml`` that are known, if present, each as its type in ``_KEYS``."""
    found = read_yaml(file, DataError)
    if not isinstance(found, dict):
        raise DataError(f"{file} is not a data.yaml: it does not say train: and names:.")
    settings = {key: value for key, value in found.items() if key in _KEYS and value is not None}
    try:
        return {key: _KEYS[key](value) for key, value in settings.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: {error}. Correct it.") from error


def _texts(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{reprlib.repr(text)} is not a folder or list of images")
    return texts


def _text(value: Any) -> str:
    (text,) = _texts([value])
    return text


def _names(value: Any) -> list[str]:
    names = value
    if isinstance(value, dict):
        if not all(type(label) is int for label in value) or sorted(value) != list(range(len(value))):
            raise ValueError(f"names must be numbered from 0 to {len(value) - 1}")
        names = [value[label] for label in range(len(value))]
    if not isinstance(names, list) or not all(isinstance(name, (str, int, float)) for name in names):
        raise TypeError(f"names are {reprlib.repr(value)}, not a list of names or names by number")
    return [str(name) for name in names]


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_CLASSES:
        raise ValueError(f"nc, the number of classes, is {reprlib.repr(value)}, not from 1 to {MOST_CLASSES:,}")
    return value


_KEYS: dict[str, Callable[[Any], Any]] = {
    "path": _text,
    **dict.fromkeys(_FOLDERS, _texts),
    "names": _names,
    "nc": _count,
}
