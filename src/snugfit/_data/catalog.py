"""Data sets by name: where each is found, how it is read, and its constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snugfit._core.known import FOLDER, check_data_set
from snugfit._core.options import of_keywords
from snugfit._core.paths import data_root
from snugfit._data import cifar, cub, digits, dogs, flowers, folder, idx, imagenet, pets, vww
from snugfit._data.download import ARCHIVES, can_download, download
from snugfit._data.files import opening
from snugfit._data.locate import find, image_folder
from snugfit._data.sets import Bordered, ImageSet, Parts, Splits
from snugfit._data.split import SplitOptions, assemble
from snugfit.errors import DataError

Statistics = tuple[float, ...]
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Source:
    """One data set.

    Attributes:
        read: opens it, given its folder, the image size and the number of decoding threads.
        image_size: default side in pixels.
        mean, std: statistics of its training images in [0, 1]; their number is the number of channels.
        flip: whether mirrored images keep their class.
        folders: folders under the data folder that it may be in.
        markers: files of which one must be there.
        origin: where the original comes from, for messages.
    """

    read: Callable[[Path, int, int], Parts]
    image_size: int
    mean: Statistics
    std: Statistics
    flip: bool
    folders: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    origin: str = ""


_IDX_FILES = ("t10k-labels-idx1-ubyte", "t10k-labels-idx1-ubyte.gz")  # the last of the four to be fetched
SOURCES: dict[str, Source] = {
    "digits": Source(lambda _, size, workers: digits.read(size), 32, (0.3057,), (0.3235,), False),
    "mnist": Source(
        lambda path, size, workers: idx.read(path, idx.DIGITS, size),
        32, (0.1307,), (0.3081,), False, ("mnist", "MNIST/raw"), _IDX_FILES,
        "train-images-idx3-ubyte.gz and its three companions from http://yann.lecun.com/exdb/mnist/",
    ),
    "fashion-mnist": Source(
        lambda path, size, workers: idx.read(path, idx.CLOTHES, size),
        32, (0.2860,), (0.3530,), True, ("fashion-mnist", "FashionMNIST/raw"), _IDX_FILES,
        "train-images-idx3-ubyte.gz and its three companions from https://github.com/zalandoresearch/fashion-mnist",
    ),
    "cifar10": Source(
        lambda path, size, workers: cifar.read(path, cifar.CIFAR10, size),
        32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), True,
        ("cifar-10-batches-bin", "cifar-10/cifar-10-batches-bin", "."), ("data_batch_1.bin", "test_batch.bin"),
        "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "cifar100": Source(
        lambda path, size, workers: cifar.read(path, cifar.CIFAR100, size),
        32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), True,
        ("cifar-100-binary", "cifar-100/cifar-100-binary", "."), ("train.bin", "test.bin"),
        "cifar-100-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "tiny-imagenet": Source(
        imagenet.read_tiny_imagenet,
        64, (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821), True,
        ("tiny-imagenet-200", "tiny-imagenet/tiny-imagenet-200", "."), ("wnids.txt",),
        "tiny-imagenet-200.zip from http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ),
    "imagenette": Source(
        imagenet.read_imagenette,
        160, *_IMAGENET, True, ("imagenette2*", "imagenette/imagenette2*"), ("train",),
        "imagenette2-160.tgz from https://github.com/fastai/imagenette",
    ),
    "vww": Source(
        vww.read,
        128, *_IMAGENET, True, ("vww", "coco", "coco2014", "coco2017", "."), vww.MARKERS,
        "train2014.zip, val2014.zip and annotations_trainval2014.zip from https://cocodataset.org into a folder 'coco'",
    ),
    "cub200": Source(
        cub.read,
        224, *_IMAGENET, True, ("CUB_200_2011", "cub200/CUB_200_2011", "."), cub.MARKERS,
        "CUB_200_2011.tgz from https://www.vision.caltech.edu/datasets/cub_200_2011/",
    ),
    "pets": Source(
        pets.read,
        224, *_IMAGENET, True, ("oxford-iiit-pet", "pets", "."), pets.MARKERS,
        "images.tar.gz and annotations.tar.gz from https://www.robots.ox.ac.uk/~vgg/data/pets/ into a folder "
        "'oxford-iiit-pet'",
    ),
    "dogs": Source(
        dogs.read,
        224, *_IMAGENET, True, ("stanford-dogs", "StanfordDogs", "dogs", "."), dogs.MARKERS,
        "images.tar and lists.tar from http://vision.stanford.edu/aditya86/ImageNetDogs/ into a folder 'stanford-dogs'",
    ),
    "flowers102": Source(
        flowers.read,
        224, *_IMAGENET, True, ("flowers-102", "flowers102", "102flowers", "."), flowers.MARKERS,
        "102flowers.tgz, imagelabels.mat and setid.mat from https://www.robots.ox.ac.uk/~vgg/data/flowers/102/ into a "
        "folder 'flowers-102'",
    ),
}  # fmt: skip
_FOLDER = Source(folder.read, 224, *_IMAGENET, True)


def names() -> list[str]:
    """Names that :func:`load` knows, ``folder:PATH`` last."""
    return [*SOURCES, FOLDER]


def load(
    name: str,
    *,
    data_dir: str | Path | None = None,
    workers: int = 2,
    **options: Any,
) -> Splits:
    """Open a data set and divide it; images stay on disk until they are read.

    Where the source has no validation part, ``val_fraction`` of the training images is split off, stratified and
    determined by ``seed``; where it has no test part either, another ``val_fraction`` is. The test part is never
    used for validation. The digits are always divided 80/10/10 in the same way.

    Args:
        name: one of :func:`names`, or ``folder:PATH`` with one sub-folder of images per class.
        data_dir: where data sets are; ``SNUGFIT_DATA`` otherwise.
        workers: threads that decode image files.
        **options: fields of :class:`snugfit._data.split.SplitOptions`; images of folders have 224 pixels by default.

    Raises:
        UnknownNameError: there is no such data set or option.
        UsageError: a number makes no sense.
        DataError: the data is missing, corrupt, or has another number of classes.
    """
    chosen = of_keywords(SplitOptions, options)
    with opening(name):
        source, path = _locate(name, data_dir)
        size = chosen.image_size or source.image_size
        parts = source.read(path, size, workers)
    shape = (len(source.mean), size, size)
    return assemble(name, parts, chosen, image_shape=shape, mean=source.mean, std=source.std, flip=source.flip)


def read_folder(
    path: str,
    *,
    image_size: int,
    channels: int = 3,
    border: int = 0,
    data_dir: str | Path | None = None,
    workers: int = 2,
) -> tuple[tuple[str, ...], list[ImageSet]]:
    """Class names and all images of a folder with one sub-folder per class, as sets that nothing was split off from.

    Args:
        path: the folder.
        image_size: side of the images in pixels, border included.
        channels: 3 (RGB) or 1 (grey).
        border: black pixels on every side.
        data_dir: where data sets are; ``SNUGFIT_DATA`` otherwise.
        workers: threads that decode.

    Raises:
        DataError: the folder is missing, or has no images of two classes.
    """
    with opening(path):
        parts = folder.read(image_folder(path, data_dir), image_size - 2 * border, workers, channels)
    return parts.class_names, [Bordered(part, border) for part in (parts.train, parts.val, parts.test) if part]


def super_classes(name: str, data_dir: str | Path | None = None) -> tuple[str, ...] | None:
    """Name of the super-class of each class, by label; None for a data set without super-classes (all but CIFAR-100).

    Raises:
        DataError: the data is missing or corrupt.
    """
    if name.lower() != "cifar100":
        return None
    with opening(name):
        return cifar.super_classes(ensure("cifar100", data_dir))


def ensure(name: str, data_dir: str | Path | None = None) -> Path:
    """Find a named data set, downloading it where it is missing, torchvision is installed and its archives are known.

    Raises:
        DataError: it is missing and cannot be downloaded; the message says where to get it.
    """
    source, root = SOURCES[name], data_root(data_dir)
    if found := find(root, source.folders, source.markers):
        return found
    _refuse_pickles(name, root)
    reason = _fetch(name, root) if name in ARCHIVES else ""
    if found := find(root, source.folders, source.markers):
        return found
    raise DataError(
        f"{name} is not in {root}{reason}; looked for {', '.join(source.folders)}.\n"
        f"Get {source.origin}, unpack it, and name its parent folder with --data-dir or SNUGFIT_DATA."
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
            f"Get the binary version instead: {SOURCES[name].origin}."
        )
