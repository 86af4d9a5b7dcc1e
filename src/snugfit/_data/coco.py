"""COCO's files of annotated objects (https://cocodataset.org/#format-data), as one label per image."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from snugfit._data.entries import identity, number, take_coco, text
from snugfit._data.files import FileNames, below
from snugfit.errors import DataError


def label_images(
    path: Path, folder: Path, category: str, share: float, files: FileNames
) -> tuple[np.ndarray, np.ndarray]:
    """Tell the images with an object of one category that covers more than a share of the image.

    The size of an object is the ``area`` of its annotation, in pixels; crowds count like single objects. The file is
    read entry by entry: 20 bytes per annotation are kept while it is read, then 16 per image and the image's name.

    Args:
        path: an ``instances_*.json``.
        folder: the folder of the images that it lists.
        category: name of the category.
        share: share of the image's pixels that the object must exceed.
        files: list of names that the images' paths are added to.

    Returns:
        Ids and labels (1 with such an object, 0 without) in the order of the file, both (N,) int64.

    Raises:
        DataError: the file is damaged or not in COCO's format, has no such category, or an image that it lists is
            missing; or an annotation belongs to no image listed.
    """
    table = _Table(path, folder, files)
    add = {"images": table.add_image, "annotations": table.add_annotation, "categories": table.add_category}
    take_coco(path, add)
    return table.labels(category, share)


class _Table:
    """What counts of one file, in columns."""

    def __init__(self, path: Path, folder: Path, files: FileNames) -> None:
        self._path, self._folder, self._files = path, folder, files
        self._ids, self._pixels = array("q"), array("d")
        self._image_ids, self._category_ids, self._areas = array("q"), array("i"), array("d")
        self._categories: dict[str, int] = {}

    def add_image(self, entry: dict[str, Any]) -> None:
        file = below(self._folder, text(entry["file_name"]), str(self._path))
        self._pixels.append(number(entry["width"], 1) * number(entry["height"], 1))
        self._ids.append(identity(entry["id"]))
        if not file.is_file():
            raise DataError(f"{file} is missing, but {self._path} lists it. Unpack {self._folder.name}.zip again.")
        self._files.append(file)

    def add_annotation(self, entry: dict[str, Any]) -> None:
        self._areas.append(number(entry["area"], 0))
        self._image_ids.append(identity(entry["image_id"]))
        self._category_ids.append(identity(entry["category_id"]))

    def add_category(self, entry: dict[str, Any]) -> None:
        self._categories[text(entry["name"])] = identity(entry["id"])

    def labels(self, category: str, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels of the images, (N,) int64 each: 1 if an object of the category covers more than ``share``."""
        if category not in self._categories:
            raise DataError(f"{self._path} has no category '{category}'. Get COCO's own instances_*.json.")
        for kind, column in (("images", self._ids), ("annotations", self._image_ids)):
            if not column:
                raise DataError(f"{self._path} has no {kind}. Get COCO's own instances_*.json.")
        ids, pixels = np.array(self._ids, dtype=np.int64), np.array(self._pixels)
        check_ids(ids, self._path)
        chosen = np.frombuffer(self._category_ids, dtype=np.intc) == self._categories[category]
        rows = places_of(np.frombuffer(self._image_ids, dtype=np.int64), ids, self._path)[chosen]
        labels = np.zeros(len(ids), dtype=np.int64)
        labels[rows[np.frombuffer(self._areas)[chosen] / pixels[rows] > share]] = 1
        return ids, labels


def places_of(annotated: np.ndarray, ids: np.ndarray, source: Path) -> np.ndarray:
    """Positions in the images' ids (N,) of the image ids (M,) of annotations: (M,) int64.

    Raises:
        DataError: an annotation is of an image that is not listed; the message names ``source``.
    """
    order = np.argsort(ids, kind="stable")
    rows: np.ndarray = order[np.searchsorted(ids, annotated, sorter=order).clip(max=len(ids) - 1)]
    unknown = annotated[ids[rows] != annotated]
    if len(unknown):
        raise DataError(f"{source} annotates an image {unknown[0]} that it does not list. Restore it.")
    return rows


def check_ids(ids: np.ndarray, source: Path) -> None:
    """Check that no id (N,) occurs twice.

    Raises:
        DataError: an id does; the message names ``source``.
    """
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise DataError(f"{source}: image {twice[0]} is listed twice. Restore the original files.")
