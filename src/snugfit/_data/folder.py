"""Image folders with one sub-folder per class, with or without train/val/test parts; Tiny ImageNet and Imagenette."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from snugfit._core.amounts import Sides, height_and_width
from snugfit._data.decode import EXTENSIONS, Decoder, check_headers, image_files
from snugfit._data.decoded import DecodedFile, KeptPixels
from snugfit._data.files import FileNames, below, check_disjoint, check_regular, lines, visible
from snugfit._data.sets import ImageSet, Parts
from snugfit.errors import DataError

VALIDATION = ("val", "valid", "validation")
_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}
CHECKED_FILES = 20_000
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


class FileImages(ImageSet):
    """Image files that are decoded when they are read, or the first time that they are read."""

    def __init__(self, files: FileNames, labels: np.ndarray, decoder: Decoder) -> None:
        self.files, self.labels, self._decoder = files, labels, decoder
        self._kept: KeptPixels | None = None

    def keep_decoded(self, file: DecodedFile) -> None:
        """Keep the pixels of each image in a file once it was decoded."""
        height, width = height_and_width(self._decoder.image_size)
        self._kept = KeptPixels(file, len(self), (height, width, self._decoder.channels))

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> uint8 (B, C, H, W)."""
        return self._decoded(indices) if self._kept is None else self._kept.images(indices, self._decoded)

    def _decoded(self, indices: np.ndarray) -> torch.Tensor:
        """Decode images, (B,) -> uint8 (B, C, H, W)."""
        return self._decoder([self.files[int(index)] for index in indices])


def read(root: Path, image_size: Sides, workers: int, channels: int = 3) -> Parts:
    """List the images under ``root``; nothing is decoded yet.

    ``train``, ``val`` and ``test`` are used unchanged. If only one of ``val`` and ``test`` exists, it is the test part,
    and validation images are split off the training images. Class folders alone are a training part.
    """
    decoder = Decoder(image_size, channels, workers)
    parts = {part: folder for part in ("train", "val", "test") if (folder := _part(root, part))}
    if "train" not in parts:
        names = _class_folders(root)
        if all(name.lower() in _SPLIT_NAMES for name in names):
            raise DataError(f"{root} holds {' and '.join(names)}, not classes. Name its splits train, val and test.")
        return Parts(names, _all_images({"train": root}, names, decoder)["train"], resources=(decoder,))
    names = _class_folders(parts["train"])
    for folder in parts.values():
        _check_same_classes(folder, names, parts["train"])
    sets = _all_images(parts, names, decoder)
    if "test" in sets:
        return Parts(names, sets["train"], sets.get("val"), sets["test"], (decoder,))
    return Parts(names, sets["train"], test=sets.get("val"), resources=(decoder,))


def _all_images(parts: dict[str, Path], names: Sequence[str], decoder: Decoder) -> dict[str, FileImages]:
    links = [folder for folder in parts.values() if folder.is_symlink()]
    sets = {part: _class_images(folder, names, decoder, links) for part, folder in parts.items()}
    if links:
        check_disjoint(*(images.files for images in sets.values()))
    return sets


def _class_folders(folder: Path) -> tuple[str, ...]:
    """Names of the visible sub-folders, sorted; there must be two."""
    names = _visible_folders(folder)
    if len(names) < 2:
        raise DataError(f"{folder} has {len(names)} class folder(s); at least two are needed, one per class.")
    return names


def _visible_folders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and visible(entry)))


def _class_images(folder: Path, class_names: Sequence[str], decoder: Decoder, links: list[Path]) -> FileImages:
    """List the images of each class folder and its sub-folders, sorted; followed links are added to ``links``."""
    files, counts = FileNames(), []
    for name in class_names:
        before = len(files)
        for path in image_files(folder / name, links):
            files.append(path)
        if len(files) == before:
            read = ", ".join(sorted(EXTENSIONS))
            raise DataError(f"the class folder {folder / name} holds no images ({read}); fill or remove it.")
        counts.append(len(files) - before)
    if len(files) <= CHECKED_FILES:
        check_headers(files[index] for index in range(len(files)))
    return FileImages(files, np.repeat(np.arange(len(counts), dtype=np.int64), counts), decoder)


def _part(root: Path, part: str) -> Path | None:
    names = VALIDATION if part == "val" else (part,)
    return next((root / name for name in names if _holds_folders(root / name)), None)


def _holds_folders(folder: Path) -> bool:
    """Whether a folder is a split with a folder per class; a class may be called train."""
    return folder.is_dir() and any(entry.is_dir() and visible(entry) for entry in folder.iterdir())


def _check_same_classes(folder: Path, names: tuple[str, ...], train: Path) -> None:
    different = sorted(set(_visible_folders(folder)) ^ set(names))
    if different:
        raise DataError(f"{train} and {folder} have different classes: only one of them has '{different[0]}'.")


def read_imagenette(root: Path, image_size: Sides, workers: int) -> Parts:
    """Read ``imagenette2*/train|val/n*/``; ``val`` serves as test set."""
    parts = read(root, image_size, workers)
    return replace(parts, class_names=tuple(_IMAGENETTE_NAMES.get(name, name) for name in parts.class_names))


def read_tiny_imagenet(root: Path, image_size: Sides, workers: int) -> Parts:
    """Read ``tiny-imagenet-200/``; its test images have no labels, so its ``val`` serves as test set."""
    names = tuple(sorted(name for line in lines(root / "wnids.txt") for name in line.split()))
    for name in names:
        if not below(root / "train", name, str(root / "wnids.txt")).is_dir():
            raise DataError(f"{root / 'train' / name} is missing, but wnids.txt lists it. Unpack the archive again.")
    decoder = Decoder(image_size, workers=workers)
    train = _class_images(root / "train", names, decoder, [])
    return Parts(names, train, test=_annotated(root / "val", names, decoder), resources=(decoder,))


def _annotated(folder: Path, names: Sequence[str], decoder: Decoder) -> FileImages:
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
    return FileImages(files, np.array(labels, dtype=np.int64), decoder)
