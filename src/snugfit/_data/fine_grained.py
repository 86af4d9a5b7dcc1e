"""Fine-grained photos in their authors' layouts: CUB-200, Oxford-IIIT Pet, Stanford Dogs and Oxford 102 Flower.

Photos are used whole: bounding boxes and parts are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from snugfit._core.amounts import Sides
from snugfit._data import folder, markers
from snugfit._data.decode import Decoder, check_headers
from snugfit._data.files import FileNames, below, lines
from snugfit._data.folder import FileImages
from snugfit._data.matlab import read_vectors
from snugfit._data.sets import Parts
from snugfit.errors import DataError

_LARGEST_ID = 10**8
_FLOWER_PARTS = {"train": "trnid", "val": "valid", "test": "tstid"}
_FLOWERS = """
pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon orchid,
bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle, yellow iris,
globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily, pincushion flower,
fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless gentian, artichoke,
sweet william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly, ruby-lipped cattleya,
cape flower, great masterwort, siam tulip, lenten rose, barbeton daisy, daffodil, sword lily, poinsettia,
bolero deep blue, wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia, wild pansy, primula,
sunflower, pelargonium, bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow dahlia, cautleya spicata,
japanese anemone, black-eyed susan, silverbush, californian poppy, osteospermum, spring crocus, bearded iris,
windflower, tree poppy, gazania, azalea, water lily, rose, thorn apple, morning glory, passion flower, lotus,
toad lily, anthurium, frangipani, clematis, hibiscus, columbine, desert-rose, tree mallow, magnolia, cyclamen,
watercress, canna lily, hippeastrum, bee balm, ball moss, foxglove, bougainvillea, camellia, mallow,
mexican petunia, bromelia, blanket flower, trumpet creeper, blackberry lily
"""
FLOWERS = tuple(" ".join(_FLOWERS.split()).split(", "))
"""Names of the classes in the order of their labels, which the files themselves do not have."""


def rows(path: Path, fields: int) -> Iterator[tuple[str, list[str]]]:
    """Lines of a text file, divided at white space into ``fields``, each with its file and line for messages.

    Empty lines and comments (``#``) are skipped.
    """
    if not path.exists():
        raise DataError(f"{path} is missing. Unpack the archive again.")
    for number, line in enumerate(lines(path), start=1):
        found = line.split()
        if not found or found[0].startswith("#"):
            continue
        if len(found) != fields:
            raise DataError(f"{path}, line {number}: '{line[:60]}' is not {fields} fields. Download it again.")
        yield f"{path}, line {number}", found


def number(text: str, low: int, high: int, place: str) -> int:
    """A whole number from ``low`` to ``high``; any other text is a ``DataError``."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
        raise DataError(f"{place}: '{text[:60]}' is not a number from {low} to {high}. Download the list again.")
    return int(text)


class Listing:
    """Image files below a folder in the order in which lists name them, with labels from 1 to ``highest``."""

    def __init__(self, folder: Path, highest: int, parts: tuple[str, ...] = ("train", "test")) -> None:
        self._folder, self._highest = folder, highest
        self._parts: dict[str, tuple[FileNames, list[int]]] = {part: (FileNames(), []) for part in parts}
        self._seen, self._classes = set[str](), dict[int, str]()

    def add(self, part: str, name: str, label: str, class_name: str, place: str) -> None:
        """Add an image to a part, with label and class name as the list has them at ``place``."""
        value, path = number(label, 1, self._highest, place), below(self._folder, name, place)
        if name in self._seen:
            raise DataError(f"{place}: {name} was listed before. Download the list again.")
        if self._classes.setdefault(value, class_name) != class_name:
            raise DataError(
                f"{place}: label {value} is for {class_name} and {self._classes[value]}. Download the list again."
            )
        if not path.is_file():
            raise DataError(f"{place}: {path} is missing. Unpack the archive of images again.")
        self._seen.add(name)
        files, labels = self._parts[part]
        files.append(path)
        labels.append(value - 1)

    def parts(self, image_size: Sides, workers: int, class_names: tuple[str, ...] = ()) -> Parts:
        """The parts; every file was opened once. Classes are those of the lists unless names are given."""
        for part, (files, _) in self._parts.items():
            if not len(files):
                raise DataError(f"the lists for {self._folder} have no {part} images. Download them again.")
            check_headers(files[index] for index in range(len(files)))
        decoder = Decoder(image_size, workers=workers)
        images = {
            part: FileImages(files, np.array(labels, dtype=np.int64), decoder)
            for part, (files, labels) in self._parts.items()
        }
        names = class_names or self._names()
        return Parts(names, images["train"], images.get("val"), images["test"], resources=(decoder,))

    def _names(self) -> tuple[str, ...]:
        names = [self._classes.get(label, "") for label in range(1, max(self._classes) + 1)]
        if "" in names:
            raise DataError(
                f"the lists for {self._folder} have no image of class {names.index('') + 1}. Download them again."
            )
        if len(names) < 2 or len(set(names)) < len(names):
            raise DataError(f"the lists for {self._folder} give one class several labels, or are of one class alone.")
        return tuple(names)


def read_cub(root: Path, image_size: Sides, workers: int) -> Parts:
    """Read Caltech-UCSD Birds-200-2011 (Wah et al., 2011, CNS-TR-2011-001): 200 kinds, 5,994 and 5,794 photos."""
    names = _cub_names(root / "classes.txt")
    labels = _cub_values(root / "image_class_labels.txt", 1, len(names))
    training = _cub_values(root / "train_test_split.txt", 0, 1)
    listing, seen = Listing(root / "images", len(names)), set[int]()
    for place, (text, name) in rows(root / "images.txt", 2):
        image = number(text, 0, _LARGEST_ID, place)
        if image in seen:
            raise DataError(f"{place}: image {image} was listed before. Download the list again.")
        if image not in labels or image not in training:
            lacking = markers.CUB[1] if image not in labels else markers.CUB[0]
            raise DataError(f"{place}: {root / lacking} has no image {image}. Download the lists again.")
        seen.add(image)
        label = labels[image]
        listing.add("train" if training[image] else "test", name, str(label), names[label - 1], place)
    unlisted = (labels.keys() | training.keys()) - seen
    if unlisted:
        raise DataError(
            f"{root / 'images.txt'} has no image {min(unlisted)}, but the other lists do. Download it again."
        )
    return listing.parts(image_size, workers, names)


def _cub_names(path: Path) -> tuple[str, ...]:
    """Names without their numbers, in the order of their labels."""
    names: list[str] = []
    for place, (text, name) in rows(path, 2):
        if number(text, 1, _LARGEST_ID, place) != len(names) + 1:
            raise DataError(f"{place}: class {text} is not the next one, {len(names) + 1}. Download the list again.")
        prefix, _, plain = name.partition(".")
        names.append(plain if plain and prefix.isdigit() else name)
    if len(names) < 2:
        raise DataError(f"{path} lists {len(names)} class(es); at least two are needed. Download it again.")
    return tuple(names)


def _cub_values(path: Path, low: int, high: int) -> dict[int, int]:
    """A value for every image, by the number of the image."""
    values: dict[int, int] = {}
    for place, (text, value) in rows(path, 2):
        image = number(text, 0, _LARGEST_ID, place)
        if image in values:
            raise DataError(f"{place}: image {image} was listed before. Download the list again.")
        values[image] = number(value, low, high, place)
    return values


def read_pets(root: Path, image_size: Sides, workers: int) -> Parts:
    """Read Oxford-IIIT Pet (Parkhi et al., CVPR 2012): 37 breeds of cats and dogs, 3,680 and 3,669 photos.

    A line of a list is the image, whose name ends in a number, its breed from 1, and species and breed of that species,
    which are not used. Photos that neither list names are passed over.
    """
    listing = Listing(root / "images", highest=37)
    for part, name in zip(("train", "test"), markers.PETS, strict=True):
        for place, (image, label, _, _) in rows(root / name, 4):
            breed = image.rpartition("_")[0]
            if not breed:
                raise DataError(f"{place}: '{image[:60]}' does not begin with a breed. Download the list again.")
            listing.add(part, f"{image}.jpg", label, breed, place)
    return listing.parts(image_size, workers)


def read_dogs(root: Path, image_size: Sides, workers: int) -> Parts:
    """Read Stanford Dogs (Khosla et al., FGVC at CVPR 2011): 120 breeds of ImageNet, 12,000 and 8,580 photos.

    ``Images/`` is divided by the two lists. Folders ``train/`` and ``test/`` of one folder per breed need no lists.
    """
    if not any((root / name).exists() for name in (*markers.DOGS, "Images")):
        parts = folder.read(root, image_size, workers)
        return replace(parts, class_names=tuple(map(_breed, parts.class_names)))
    listing = Listing(root / "Images", highest=120)
    for part, name in zip(("train", "test"), markers.DOGS, strict=True):
        for entry, (image, label) in enumerate(_dog_entries(root / name), start=1):
            listing.add(part, image, label, _breed(image.partition("/")[0]), f"{root / name}, entry {entry}")
    return listing.parts(image_size, workers)


def _breed(name: str) -> str:
    """``Chihuahua`` of ``n02085620-Chihuahua``."""
    return name.partition("-")[2] or name


def _dog_entries(path: Path) -> list[tuple[str, str]]:
    """Name and label of every image in a list."""
    if not path.is_file():
        raise DataError(
            f"{path} is missing. Unpack lists.tar in {path.parent}; "
            f"or let snugfit divide the images: --data folder:{path.parent / 'Images'}."
        )
    content = read_vectors(path, texts=["file_list"], numbers=["labels"])
    names, labels = content["file_list"], content["labels"]
    if len(names) != len(labels):
        raise DataError(f"{path} has {len(names)} names but {len(labels)} labels. Download it again.")
    return list(zip(names, labels, strict=True))


def read_flowers(root: Path, image_size: Sides, workers: int) -> Parts:
    """Read Oxford 102 Flower (Nilsback and Zisserman, ICVGIP 2008): 102 kinds, 1,020, 1,020 and 6,149 photos.

    ``imagelabels.mat`` has the label of every ``jpg/image_00001.jpg``, from 1; ``setid.mat`` the numbers of the images
    to train on (``trnid``), to validate on (``valid``) and to test on (``tstid``).
    """
    path, division = root / "imagelabels.mat", root / "setid.mat"
    texts = read_vectors(path, numbers=["labels"])["labels"]
    labels = [number(text, 1, len(FLOWERS), f"{path}, entry {entry}") for entry, text in enumerate(texts, start=1)]
    parts = read_vectors(division, numbers=_FLOWER_PARTS.values())
    if (count := sum(map(len, parts.values()))) != len(labels):
        raise DataError(f"{path} has {len(labels)} labels, but {division} names {count} images. Download both again.")
    listing = Listing(root / "jpg", len(FLOWERS), tuple(_FLOWER_PARTS))
    for part, variable in _FLOWER_PARTS.items():
        for entry, text in enumerate(parts[variable], start=1):
            place = f"{division}, {variable}, entry {entry}"
            image = number(text, 1, len(labels), place)
            label = labels[image - 1]
            listing.add(part, f"image_{image:05d}.jpg", str(label), FLOWERS[label - 1], place)
    return listing.parts(image_size, workers, FLOWERS)
