"""Download original archives with torchvision's helpers, if torchvision is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_PETS = "https://thor.robots.ox.ac.uk/pets/"
_FLOWERS = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"


@dataclass(frozen=True)
class Archive:
    """A file to download: its address, its MD5 sum, and its folder below the data folder."""

    url: str
    md5: str
    folder: str = "."

    @property
    def unpacked(self) -> bool:
        """Whether it is an archive of files; single compressed files are not unpacked."""
        return self.url.endswith((".tar.gz", ".tgz", ".zip"))


ARCHIVES: dict[str, tuple[Archive, ...]] = {
    "cifar10": (
        Archive("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    ),
    "cifar100": (
        Archive("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
    ),
    "mnist": (
        Archive(_MNIST + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", "mnist"),
        Archive(_MNIST + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", "mnist"),
        Archive(_MNIST + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", "mnist"),
        Archive(_MNIST + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", "mnist"),
    ),
    "fashion-mnist": (
        Archive(_FASHION + "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "fashion-mnist"),
        Archive(_FASHION + "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", "fashion-mnist"),
        Archive(_FASHION + "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", "fashion-mnist"),
        Archive(_FASHION + "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", "fashion-mnist"),
    ),
    "tiny-imagenet": (Archive("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
    "pets": (  # lists last, because the data set is found by them
        Archive(_PETS + "images.tar.gz", "5c4f3ee8e5d25df40f4fd59a7f44e54c", "oxford-iiit-pet"),
        Archive(_PETS + "annotations.tar.gz", "95a8c909bbe2e81eed6a22bccdf3f68f", "oxford-iiit-pet"),
    ),
    "flowers102": (  # as for pets
        Archive(_FLOWERS + "102flowers.tgz", "52808999861908f626f3c1f4e79d11fa", "flowers-102"),
        Archive(_FLOWERS + "imagelabels.mat", "e0620be6f572b9609742df49c70aed4d", "flowers-102"),
        Archive(_FLOWERS + "setid.mat", "a5357ecc9cb78c4bef273ce3793fc85c", "flowers-102"),
    ),
    "imagenette": (
        Archive("https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz", "e793b78cc4c9e9a4ccc0c1155377a412"),
    ),
}


def can_download() -> bool:
    """Whether torchvision, whose download helpers are used, is installed."""
    return importlib.util.find_spec("torchvision") is not None


def download(name: str, root: Path) -> None:
    """Fetch, verify and unpack the original files of a data set into ``root``.

    Raises:
        OSError, RuntimeError: the network fails, or a file is damaged.
    """
    from torchvision.datasets import utils

    with contextlib.redirect_stdout(sys.stderr):
        for archive in ARCHIVES[name]:
            folder = str(root / archive.folder)
            if archive.unpacked:
                with _unpacked_whole(root / archive.folder, name) as unpacking:
                    utils.download_and_extract_archive(archive.url, folder, str(unpacking), md5=archive.md5)
            else:
                utils.download_url(archive.url, folder, md5=archive.md5)


@contextlib.contextmanager
def _unpacked_whole(folder: Path, name: str) -> Iterator[Path]:
    """A folder to unpack in; its content moves to ``folder`` at the end, so that half a data set is never found."""
    unpacking = folder / f".unpacking-{name}"
    shutil.rmtree(unpacking, ignore_errors=True)
    unpacking.mkdir(parents=True)
    try:
        yield unpacking
        for entry in sorted(unpacking.iterdir()):
            target = folder / entry.name
            if target.is_dir():
                shutil.rmtree(target)  # left by an earlier unpacking
            entry.replace(target)
    finally:
        shutil.rmtree(unpacking, ignore_errors=True)
