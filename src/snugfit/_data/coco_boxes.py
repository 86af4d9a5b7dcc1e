"""Boxes in COCO's files of annotated objects, ``instances_*.json`` (https://cocodataset.org/#format-data).

Crowds are left out, as they are when detectors are trained on COCO. Classes are the categories in the order of their
ids.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from snugfit._data.box_checks import BoxChecks
from snugfit._data.boxes import BoxedImages, BoxTable
from snugfit._data.coco import check_ids, places_of
from snugfit._data.decode import Decoder
from snugfit._data.entries import identity, number, take_coco, text
from snugfit._data.files import FileNames, below
from snugfit._data.sets import check_class_count
from snugfit.errors import DataError

ROBOFLOW = "_annotations.coco.json"
_PARTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


def find(root: Path) -> dict[str, tuple[Path, Path]]:
    """The file of annotations and the folder of images of each part below a folder; empty if there are none.

    Looked for are ``annotations/instances_train2017.json`` (any year, or none) with ``train2017/`` or
    ``images/train2017/``, and ``train/_annotations.coco.json``; the same for val and test.
    """
    found = {}
    for part, names in _PARTS.items():
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


def read(
    found: dict[str, tuple[Path, Path]], image_size: int, workers: int
) -> tuple[tuple[str, ...], dict[str, BoxedImages], Decoder, BoxChecks]:
    """Read the parts; images are not decoded yet.

    Raises:
        DataError: a file is damaged or not in COCO's format, an image that it lists is missing, parts have other
            categories than others, or there are no boxes to train on.
    """
    checks, decoder = BoxChecks(), Decoder(image_size, workers=workers, crop=False)
    parts, names = {}, tuple[str, ...]()
    for part, (path, folder) in found.items():
        listing = _Listing(path, folder, checks)
        parts[part] = BoxedImages(listing.files, listing.boxes(), decoder)
        if part != "train" and listing.class_names != names:
            raise DataError(f"{path} has other categories than {found['train'][0]}. Give all parts the same ones.")
        names = listing.class_names
    if not len(parts["train"].boxes.rows):
        raise DataError(f"{found['train'][0]} holds no boxes to train on.")
    return names, parts, decoder, checks


class _Listing:
    """What counts of one file, in columns."""

    def __init__(self, path: Path, folder: Path, checks: BoxChecks) -> None:
        self._path, self._folder, self._checks = path, folder, checks
        self.files, self._categories = FileNames(), dict[int, str]()
        self._ids, self._sizes = array("q"), array("d")
        self._image_ids, self._category_ids, self._boxes = array("q"), array("q"), array("d")
        add = {"images": self._add_image, "annotations": self._add_box, "categories": self._add_category}
        take_coco(path, add)
        if not len(self.files) or not self._categories:
            raise DataError(f"{path} has no {'categories' if len(self.files) else 'images'}: not COCO's instances.")
        check_class_count(len(self._categories), path)
        check_ids(np.array(self._ids, dtype=np.int64), path)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self._categories[number] for number in sorted(self._categories))

    def _add_image(self, entry: dict[str, Any]) -> None:
        file = below(self._folder, text(entry["file_name"]), str(self._path))
        width, height = number(entry["width"], 1), number(entry["height"], 1)
        if not file.is_file():
            raise DataError(f"{file} is missing, but {self._path} lists it. Restore the images of {self._folder}.")
        self._ids.append(identity(entry["id"]))
        self._sizes.extend((width, height))
        self.files.append(file)

    def _add_box(self, entry: dict[str, Any]) -> None:
        if entry.get("iscrowd"):
            self._checks.count("crowds were left out")
            return
        left, top, width, height = map(number, entry["bbox"])
        self._image_ids.append(identity(entry["image_id"]))
        self._category_ids.append(identity(entry["category_id"]))
        self._boxes.extend((left, top, width, height))

    def _add_category(self, entry: dict[str, Any]) -> None:
        self._categories[identity(entry["id"])] = text(entry["name"])

    def boxes(self) -> Any:
        """The boxes by image, in the order of the images.

        Raises:
            DataError: an annotation is of no image or category listed, or lies outside its image.
        """
        ids, image_ids = np.array(self._ids, dtype=np.int64), np.array(self._image_ids, dtype=np.int64)
        images = places_of(image_ids, ids, self._path)
        labels = {number: label for label, number in enumerate(sorted(self._categories))}
        table, by_image = BoxTable(), np.argsort(images, kind="stable")
        ends = np.searchsorted(images[by_image], np.arange(len(ids)), side="right")
        start = 0
        for image, end in enumerate(ends.tolist()):
            rows = [self._row(place, image, labels) for place in by_image[start:end].tolist()]
            table.add(self._checks.rows(rows, f"{self._path}, image {ids[image]}"))
            start = end
        return table.boxes()

    def _row(self, place: int, image: int, labels: dict[int, int]) -> Any:
        category = self._category_ids[place]
        if category not in labels:
            raise DataError(f"{self._path} annotates an object of category {category}, which it does not list.")
        left, top, width, height = self._boxes[4 * place : 4 * place + 4]
        across, down = self._sizes[2 * image : 2 * image + 2]
        return (labels[category], (left + width / 2) / across, (top + height / 2) / down, width / across, height / down)
