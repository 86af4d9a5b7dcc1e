"""Data sets by name: their folders, readers and constants."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from snugfit._core.amounts import Sides, height_and_width, sides_text
from snugfit._core.functions import import_function, is_function
from snugfit._core.hardware import decoding_threads
from snugfit._core.known import FOLDER, check_data_set
from snugfit._core.options import from_keywords
from snugfit._core.paths import data_root, expanded
from snugfit._data import markers
from snugfit._data.download import ARCHIVES, can_download, download
from snugfit._data.files import opening
from snugfit._data.sets import IMAGENET, Bordered, ImageSet, Parts, Splits, Statistics
from snugfit._data.small_images import (
    CIFAR10,
    CIFAR100,
    CLOTHES,
    DIGITS,
    cifar_super_classes,
    read_cifar,
    read_digits,
    read_mnist,
)
from snugfit._data.split import SplitOptions, assemble
from snugfit.errors import DataError, UsageError

Reader = Callable[..., Parts]
"""Opens a data set, given its folder, the image size and the number of decoding threads."""


@dataclass(frozen=True)
class Late:
    """A reader of a module that is imported when it is used, or by :func:`import_reader`."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Parts:
        """Read."""
        parts: Parts = getattr(self.load(), self.name)(*args)
        return parts

    def load(self) -> ModuleType:
        """Import the module."""
        return import_module(f"snugfit._data.{self.module}")


@dataclass(frozen=True)
class Source:
    """One data set.

    Attributes:
        image_size: default side in pixels.
        statistics: mean and standard deviation per channel of its training images in [0, 1].
        flip: whether mirrored images keep their class.
        markers: files of which one must be in its folder.
    """

    read: Reader
    image_size: int
    statistics: tuple[Statistics, Statistics] = IMAGENET
    flip: bool = True
    markers: tuple[str, ...] = ()


_IDX_FILES = ("t10k-labels-idx1-ubyte", "t10k-labels-idx1-ubyte.gz")  # the last of the four to be fetched
_CIFAR10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_CIFAR100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
_DOG = "n02085620-Chihuahua"
_TINY = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)

SOURCES: dict[str, Source] = {
    "digits": Source(read_digits, 32, ((0.3057,), (0.3235,)), False),
    "mnist": Source(partial(read_mnist, DIGITS), 32, ((0.1307,), (0.3081,)), False, _IDX_FILES),
    "fashion-mnist": Source(partial(read_mnist, CLOTHES), 32, ((0.2860,), (0.3530,)), True, _IDX_FILES),
    "cifar10": Source(partial(read_cifar, CIFAR10), 32, _CIFAR10, True, ("data_batch_1.bin", "test_batch.bin")),
    "cifar100": Source(partial(read_cifar, CIFAR100), 32, _CIFAR100, True, ("train.bin", "test.bin")),
    "tiny-imagenet": Source(Late("folder", "read_tiny_imagenet"), 64, _TINY, True, ("wnids.txt",)),
    "imagenette": Source(Late("folder", "read_imagenette"), 160, markers=("train",)),
    "vww": Source(Late("vww", "read"), 128, markers=markers.VWW),
    "cub200": Source(Late("fine_grained", "read_cub"), 224, markers=markers.CUB),
    "pets": Source(Late("fine_grained", "read_pets"), 224, markers=markers.PETS),
    "dogs": Source(Late("fine_grained", "read_dogs"), 224, markers=(*markers.DOGS, f"Images/{_DOG}", f"train/{_DOG}")),
    "flowers102": Source(Late("fine_grained", "read_flowers"), 224, markers=("setid.mat",)),  # it is fetched last
}
_FOLDER = Source(Late("folder", "read"), 224)

_PLACES: dict[str, tuple[str, ...]] = {
    "mnist": ("mnist", "MNIST/raw"),
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw"),
    "cifar10": ("cifar-10-batches-bin", "cifar-10/cifar-10-batches-bin", "."),
    "cifar100": ("cifar-100-binary", "cifar-100/cifar-100-binary", "."),
    "tiny-imagenet": ("tiny-imagenet-200", "tiny-imagenet/tiny-imagenet-200", "."),
    "imagenette": ("imagenette2*", "imagenette/imagenette2*"),
    "vww": ("vww", "coco", "coco2014", "coco2017", "."),
    "cub200": ("CUB_200_2011", "cub200/CUB_200_2011", "."),
    "pets": ("oxford-iiit-pet", "pets", "."),
    "dogs": ("stanford-dogs", "StanfordDogs", "dogs", "."),
    "flowers102": ("flowers-102", "flowers102", "102flowers", "."),
}
"""Folders below the data folder in which each data set may be."""

_MNIST_FILES = "train-images-idx3-ubyte.gz and its three companions from "
_VGG = "https://www.robots.ox.ac.uk/~vgg/data"
_ORIGINS: dict[str, str] = {
    "mnist": f"{_MNIST_FILES}http://yann.lecun.com/exdb/mnist/",
    "fashion-mnist": f"{_MNIST_FILES}https://github.com/zalandoresearch/fashion-mnist",
    "cifar10": "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html",
    "cifar100": "cifar-100-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html",
    "tiny-imagenet": "tiny-imagenet-200.zip from http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "imagenette": "imagenette2-160.tgz from https://github.com/fastai/imagenette",
    "vww": "train2014.zip, val2014.zip and annotations_trainval2014.zip from https://cocodataset.org into a folder "
    "'coco'",
    "cub200": "CUB_200_2011.tgz from https://www.vision.caltech.edu/datasets/cub_200_2011/",
    "pets": f"images.tar.gz and annotations.tar.gz from {_VGG}/pets/ into a folder 'oxford-iiit-pet'",
    "dogs": "images.tar and lists.tar from http://vision.stanford.edu/aditya86/ImageNetDogs/ into a folder "
    "'stanford-dogs'",
    "flowers102": f"102flowers.tgz, imagelabels.mat and setid.mat from {_VGG}/flowers/102/ into a folder 'flowers-102'",
}
"""Where the original files of each data set come from, for messages."""


def names() -> list[str]:
    """Names that :func:`load` knows, ``folder:PATH`` last."""
    return [*SOURCES, FOLDER]


def import_reader(name: str) -> None:
    """Import what reads a data set, before memory counts; nothing for an unknown name.

    Raises:
        DataError: it is a function of the user's own that cannot be imported.
    """
    if is_function(name):
        import_module("snugfit._data.own")
        import_function(name, DataError)
    source = _FOLDER if name.partition(":")[0] == "folder" else SOURCES.get(name.lower())
    if source is not None and isinstance(source.read, Late):
        source.read.load()


def load(name: str, *, data_dir: str | Path | None = None, workers: int | str = "auto", **options: Any) -> Splits:
    """Open a data set and divide it; images stay on disk until they are read.

    If the source has no validation part, ``val_fraction`` of the training images is split off, stratified and
    determined by ``seed``; if it has no test part either, another ``val_fraction`` is. The test part is never
    used for validation. The digits are always divided 80/10/10 in the same way.

    Args:
        name: one of :func:`names`, ``folder:PATH`` with one sub-folder of images per class, or ``module:function`` of
            the user's own, which gives data sets.
        data_dir: folder of data sets; ``SNUGFIT_DATA`` otherwise.
        workers: threads that decode image files; ``"auto"`` takes one for each core, 2 at least and 8 at most.
        **options: fields of :class:`snugfit._data.split.SplitOptions`; images of folders have 224 pixels by default.

    Raises:
        UnknownNameError: there is no such data set or option.
        UsageError: a number makes no sense.
        DataError: the data is missing, corrupt, or has another number of classes.
    """
    if is_function(name):
        found: Splits = import_module("snugfit._data.own").load_function(name, **options)
        return found
    chosen = from_keywords(SplitOptions, options)
    with opening(name):
        source, path = _locate(name, data_dir)
        size = chosen.sides or source.image_size
        if not isinstance(size, int) and not isinstance(source.read, Late):
            raise UsageError(
                f"--image-size {sides_text(size)}: the images of {name} are square; only those of files are brought to "
                "other shapes. Give one side."
            )
        parts = source.read(path, size, decoding_threads(workers))
    mean, std = source.statistics
    shape = (len(mean), *height_and_width(size))
    return assemble(name, parts, chosen, image_shape=shape, mean=mean, std=std, flip=source.flip)


def read_folder(
    path: str,
    *,
    image_size: Sides,
    channels: int = 3,
    border: int = 0,
    data_dir: str | Path | None = None,
    workers: int | str = "auto",
) -> tuple[tuple[str, ...], list[ImageSet]]:
    """Class names and all images of a folder with one sub-folder per class, undivided; sizes include the border.

    Raises:
        DataError: the folder is missing, or has no images of two classes.
    """
    with opening(path):
        height, width = (side - 2 * border for side in height_and_width(image_size))
        parts = _FOLDER.read(image_folder(path, data_dir), (height, width), decoding_threads(workers), channels)
    return parts.class_names, [Bordered(part, border) for part in (parts.train, parts.val, parts.test) if part]


def super_classes(name: str, data_dir: str | Path | None = None) -> tuple[str, ...] | None:
    """Name of the super-class of each class, by label; None for all but CIFAR-100."""
    if name.lower() != "cifar100":
        return None
    with opening(name):
        return cifar_super_classes(ensure("cifar100", data_dir))


def ensure(name: str, data_dir: str | Path | None = None) -> Path:
    """Find a named data set; download it if it is missing, torchvision is installed and its archives are known."""
    source, root = SOURCES[name], data_root(data_dir)
    if found := _find(root, _PLACES[name], source.markers):
        return found
    _refuse_pickles(name, root)
    reason = _fetch(name, root) if name in ARCHIVES else ""
    if found := _find(root, _PLACES[name], source.markers):
        return found
    raise DataError(
        f"{name} is not in {root}{reason}; looked for {', '.join(_PLACES[name])}.\n"
        f"Get {_ORIGINS[name]}, unpack it, and name its parent folder with --data-dir or SNUGFIT_DATA."
    )


def _fetch(name: str, root: Path) -> str:
    """Download a data set if torchvision is there to do it; returns why that failed, or nothing."""
    first = ARCHIVES[name][0]
    archive = root / Path(first.url).name
    if archive.is_file() and not can_download():
        raise DataError(f"{archive} is there but not unpacked. Unpack it in {root / first.folder}.")
    if can_download():
        try:
            download(name, root)
        except (OSError, RuntimeError) as error:
            return f" (downloading it failed: {error})"
    return ""


def _locate(name: str, data_dir: str | Path | None) -> tuple[Source, Path]:
    kind, _, path = name.partition(":")
    check_data_set(name, SOURCES)
    if kind == "folder":
        return _FOLDER, image_folder(path, data_dir)
    key = name.lower()
    return SOURCES[key], Path() if key == "digits" else ensure(key, data_dir)


def _refuse_pickles(name: str, root: Path) -> None:
    pickled = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}.get(name)
    if pickled and (root / pickled).is_dir():
        raise DataError(
            f"{root / pickled} holds pickles, which can run any code when read, so snugfit does not read them.\n"
            f"Get the binary version instead: {_ORIGINS[name]}."
        )


def image_folder(path: str, data_dir: str | Path | None) -> Path:
    """Resolve the PATH of ``folder:PATH``: as given, otherwise below the data folder."""
    given = expanded(path)
    if given.is_dir():
        return given
    if not given.is_absolute() and (data_dir or os.environ.get("SNUGFIT_DATA")):
        below = data_root(data_dir) / given
        if below.is_dir():
            return below
    raise DataError(f"the image folder '{path}' does not exist. Give a folder with one sub-folder per class.")


def _find(root: Path, folders: tuple[str, ...], markers: tuple[str, ...]) -> Path | None:
    """First of ``folders`` under ``root`` (globs allowed) that holds one of ``markers``; None if none does."""
    for pattern in folders:
        matches = [root] if pattern == "." else sorted(root.glob(pattern))
        for match in matches:
            if any((match / marker).exists() for marker in markers):
                return match
    return None
