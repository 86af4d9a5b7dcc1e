"""Oxford-IIIT Pet (Parkhi et al., CVPR 2012): 37 breeds of cats and dogs, 3,680 and 3,669 photos."""

from __future__ import annotations

from pathlib import Path

from snugfit._data.listed import Listing, rows
from snugfit._data.sets import Parts
from snugfit.errors import DataError

MARKERS = ("annotations/trainval.txt", "annotations/test.txt")
_BREEDS = 37


def read(root: Path, image_size: int, workers: int) -> Parts:
    """Read ``images/`` by the lists ``annotations/trainval.txt`` and ``test.txt``; classes are the 37 breeds.

    A line of a list is the image, whose name ends in a number, its breed from 1, and species and breed of that species,
    which are not used. Photos that neither list names are passed over.

    Raises:
        DataError: a list or image is missing, a line is malformed or repeated, or a file is not an image.
    """
    listing = Listing(root / "images", _BREEDS)
    for part, marker in zip(("train", "test"), MARKERS, strict=True):
        for place, (name, label, _, _) in rows(root / marker, 4):
            breed = name.rpartition("_")[0]
            if not breed:
                raise DataError(f"{place}: '{name[:60]}' does not begin with a breed. Download the list again.")
            listing.add(part, f"{name}.jpg", label, breed, place)
    return listing.parts(image_size, workers)
