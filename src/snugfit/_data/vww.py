"""Visual Wake Words (Chowdhery et al., 2019, arXiv:1906.05721): is a person in the image? Read from COCO's own files.

**Labels.** An image is a ``person`` if one annotation of COCO's category 'person', crowds included, covers more than
0.5 % of the image, and ``no person`` otherwise, also without any annotations. The paper speaks of the area of the
bounding box. The script that its authors published (``build_visualwakewords_data`` in TensorFlow's models) compares the
annotation's ``area`` instead, which in COCO is the area within the object's outline, and so does ``pyvww``, with which
others make the set. Labels here are to equal theirs, so ``area`` decides; by boxes more images would be of persons.
At exactly 0.5 % the script says yes; the paper and ``pyvww`` say no, and so does this file.

**Division.** The paper tests on the 8,059 images of TensorFlow's ``mscoco_minival_ids.txt`` and trains on the 115,228
others of train2014 and val2014. Put that file into ``annotations/`` for this division; the releases of 2014 and 2017
hold the same images, so it serves with both. Without it, COCO's own training part is for training and its validation
part (40,504 images in 2014, 5,000 in 2017) for the test; accuracies then do not compare with the paper's.

**Images** are cropped to their centre as in every other data set, but labels belong to the whole image.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from snugfit._core.amounts import Sides
from snugfit._data import markers
from snugfit._data.coco import Instances, check_ids, number
from snugfit._data.decode import Decoder
from snugfit._data.files import FileNames, lines
from snugfit._data.folder import FileImages
from snugfit._data.sets import Parts, Subset
from snugfit.errors import DataError

CLASS_NAMES = ("no person", "person")
_SHARE = 0.005
_LIST = "mscoco_minival_ids.txt"


def read(root: Path, image_size: Sides, workers: int) -> Parts:
    """Read ``annotations/instances_train|val<year>.json`` with the images in ``train<year>/`` and ``val<year>/``.

    The year is 2014, or 2017 if one of the two files of 2014 is missing. The half GB of annotations is read each time,
    entry by entry: that takes some 20 seconds and some 50 MB of memory, of which 30 MB are kept. A memory budget must
    have headroom for them.
    """
    annotations, year = root / "annotations", _release(root)
    files, described = FileNames(), []
    for folder in (root / f"train{year}", root / f"val{year}"):
        if not folder.is_dir():
            raise DataError(f"{folder} is missing. Unpack {folder.name}.zip from https://cocodataset.org in {root}.")
        described.append(_Areas(annotations / f"instances_{folder.name}.json", folder, files).labels())
    ids, labels = (np.concatenate(column) for column in zip(*described, strict=True))
    check_ids(ids, annotations)
    tested = _tested(annotations / _LIST, ids, trained=len(described[0][0]))
    decoder = Decoder(image_size, workers=workers)
    images = FileImages(files, labels, decoder)
    train, test = (Subset(images, np.flatnonzero(chosen)) for chosen in (~tested, tested))
    return Parts(CLASS_NAMES, train, test=test, resources=(decoder,))


class _Areas(Instances):
    """A file with the areas of its annotations, in pixels: 20 bytes per annotation, crowds included."""

    advice = "Unpack {name}.zip again."

    def __init__(self, path: Path, folder: Path, files: FileNames) -> None:
        super().__init__(path, folder, files)
        self.category_ids = array("i")

    def add_annotation(self, entry: dict[str, Any]) -> None:
        self.values.append(number(entry["area"], 0))
        super().add_annotation(entry)

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels of the images in the order of the file, both (N,) int64."""
        self.read()
        persons = [category for category, name in self.categories.items() if name == "person"]
        if not persons:
            raise DataError(f"{self.path} has no category 'person'. Get COCO's own instances_*.json.")
        for kind, column in (("images", self.ids), ("annotations", self.image_ids)):
            if not column:
                raise DataError(f"{self.path} has no {kind}. Get COCO's own instances_*.json.")
        ids, images = self.annotated()
        chosen = np.frombuffer(self.category_ids, dtype=np.intc) == persons[-1]
        pixels = np.frombuffer(self.sizes).reshape(-1, 2).prod(axis=1)
        labels = np.zeros(len(ids), dtype=np.int64)
        rows = images[chosen]
        labels[rows[np.frombuffer(self.values)[chosen] / pixels[rows] > _SHARE]] = 1
        return ids, labels


def _release(root: Path) -> int:
    missing = {year: [path for path in _annotations(root, year) if not path.is_file()] for year in (2014, 2017)}
    for year, paths in missing.items():
        if not paths:
            return year
    year = min(missing, key=lambda year: len(missing[year]))
    raise DataError(f"{missing[year][0]} is missing. Unpack annotations_trainval{year}.zip in {root}.")


def _annotations(root: Path, year: int) -> list[Path]:
    return [root / marker for marker in markers.VWW if str(year) in marker]


def _tested(path: Path, ids: np.ndarray, trained: int) -> np.ndarray:
    """Mask (N,) of the test images: the listed ones, or without a list all after the first ``trained``."""
    if not path.is_file():
        return np.arange(len(ids)) >= trained
    listed = _listed(path)
    unknown = np.setdiff1d(listed, ids)
    if len(unknown):
        raise DataError(
            f"{path} lists image {unknown[0]}, which neither part of COCO has. Download it again or remove it."
        )
    tested = np.isin(ids, listed)
    if tested.all():
        raise DataError(f"{path} leaves no images to train on. Download it again or remove it.")
    return tested


def _listed(path: Path) -> np.ndarray:
    listed = []
    for place, text in enumerate(lines(path), start=1):
        if text and not (text.isascii() and text.isdigit() and len(text) < 19):
            raise DataError(f"{path}, line {place}: '{text[:60]}' is not an image id. Download it again or remove it.")
        listed += [int(text)] if text else []
    if not listed:
        raise DataError(f"{path} lists no images. Download it again or remove it.")
    return np.array(listed, dtype=np.int64)
