"""Image folders with one sub-folder per class, with or without train/val/test parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from snugfit._data.decode import EXTENSIONS, Decoder, check_headers
from snugfit._data.files import FileNames, check_disjoint, visible, walk
from snugfit._data.sets import Parts
from snugfit.errors import DataError

_VALIDATION = ("val", "valid", "validation")
_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}
_CHECKED_FILES = 20_000


class FileImages:
    """Image files that are decoded when they are read."""

    def __init__(self, files: FileNames, labels: np.ndarray, decoder: Decoder) -> None:
        self.files, self.labels, self._decoder = files, labels, decoder

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Decode images, (B,) -> uint8 (B, C, H, W)."""
        return self._decoder([self.files[int(index)] for index in indices])


def read(root: Path, image_size: int, workers: int, channels: int = 3) -> Parts:
    """List the images under ``root``; nothing is decoded yet.

    ``train``, ``val`` and ``test`` are used unchanged. If only one of ``val`` and ``test`` exists, it is the test part,
    and validation images are split off the training images. Class folders alone are a training part.

    Raises:
        DataError: a class folder is empty, there are fewer than two classes, the parts' classes differ, or a file
            is not an image.
    """
    decoder = Decoder(image_size, channels, workers)
    parts = {part: folder for part in ("train", "val", "test") if (folder := _part(root, part))}
    if "train" not in parts:
        names = class_folders(root)
        if all(name.lower() in _SPLIT_NAMES for name in names):
            raise DataError(f"{root} holds {' and '.join(names)}, not classes. Name its splits train, val and test.")
        return Parts(names, _all_images({"train": root}, names, decoder)["train"], resources=(decoder,))
    names = class_folders(parts["train"])
    for folder in parts.values():
        _check_same_classes(folder, names, parts["train"])
    sets = _all_images(parts, names, decoder)
    if "test" in sets:
        return Parts(names, sets["train"], sets.get("val"), sets["test"], (decoder,))
    return Parts(names, sets["train"], test=sets.get("val"), resources=(decoder,))


def _all_images(parts: dict[str, Path], names: Sequence[str], decoder: Decoder) -> dict[str, FileImages]:
    links = [folder for folder in parts.values() if folder.is_symlink()]
    sets = {part: class_images(folder, names, decoder, links) for part, folder in parts.items()}
    if links:
        check_disjoint(*(images.files for images in sets.values()))
    return sets


def class_folders(folder: Path) -> tuple[str, ...]:
    """Names of the visible sub-folders, sorted.

    Raises:
        DataError: there are fewer than two.
    """
    names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and visible(entry)))
    if len(names) < 2:
        raise DataError(f"{folder} has {len(names)} class folder(s); at least two are needed, one per class.")
    return names


def class_images(folder: Path, class_names: Sequence[str], decoder: Decoder, links: list[Path]) -> FileImages:
    """List the images of each class folder, sub-folders included, in sorted order.

    Args:
        folder: parent of the class folders.
        class_names: their names.
        decoder: decodes the images.
        links: list to which every followed link is added.

    Raises:
        DataError: a class folder holds no images, or a file is not an image.
    """
    files, counts = FileNames(), []
    for name in class_names:
        before = len(files)
        for path in walk(folder / name, EXTENSIONS, links):
            files.append(path)
        if len(files) == before:
            raise DataError(f"the class folder {folder / name} holds no jpg, png or webp images. Fill or remove it.")
        counts.append(len(files) - before)
    if len(files) <= _CHECKED_FILES:
        check_headers(files[index] for index in range(len(files)))
    return FileImages(files, np.repeat(np.arange(len(counts), dtype=np.int64), counts), decoder)


def _part(root: Path, part: str) -> Path | None:
    names = _VALIDATION if part == "val" else (part,)
    return next((root / name for name in names if _holds_folders(root / name)), None)


def _holds_folders(folder: Path) -> bool:
    """Whether a folder is a split with a folder per class; a class may be called train."""
    return folder.is_dir() and any(entry.is_dir() and visible(entry) for entry in folder.iterdir())


def _check_same_classes(folder: Path, names: tuple[str, ...], train: Path) -> None:
    different = sorted(set(class_folders(folder)) ^ set(names))
    if different:
        raise DataError(f"{train} and {folder} have different classes: only one of them has '{different[0]}'.")
