"""Image sets on disk, and their division into training, validation and test splits."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from snugfit._core.amounts import Sides, height_and_width
from snugfit._core.inputs import Input
from snugfit.errors import DataError

if TYPE_CHECKING:  # the first imports PIL, which records of pixels do not need
    from snugfit._data.decode import Decoder
    from snugfit._data.decoded import DecodedFile

MOST_CLASSES = 100_000
"""ImageNet-21k has 21,843."""
MOST_RECORDS = 10**7
"""Largest number of records in a file; every record has a label in memory."""

Statistics = tuple[float, ...]
IMAGENET: tuple[Statistics, Statistics] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation per channel of ImageNet's images in [0, 1]."""


class ImageSet(ABC):
    """Labelled images on disk, or owned by the caller; never a float copy of a data set.

    Attributes:
        labels: class of each image, (N,) int64; or whether it has each, (N, classes) uint8 of 0 and 1.
        has_boxes: whether images have boxes besides.
        runs_own_code: whether reading runs the caller's code, which may draw random numbers and so stays in the
            caller's thread.
    """

    labels: np.ndarray
    has_boxes: ClassVar[bool] = False
    runs_own_code: bool = False

    def __len__(self) -> int:
        """Number of images, N."""
        return len(self.labels)

    @property
    def has_several_labels(self) -> bool:
        """Whether labels tell of each class whether an image has it."""
        return self.labels.ndim > 1

    def keep_decoded(self, file: DecodedFile) -> None:
        """Decode each image once, if it needs to be decoded, and keep its pixels in a file."""
        return

    @abstractmethod
    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read the images at ``indices`` (B,) as uint8 (B, C, H, W) of the image size."""


class Subset(ImageSet):
    """Some images of another set, in the order of ``indices`` (M,) int64."""

    def __init__(self, parent: ImageSet, indices: np.ndarray) -> None:
        self.parent, self.indices = parent, np.asarray(indices, dtype=np.int64)
        self.labels, self.runs_own_code = parent.labels[self.indices], parent.runs_own_code

    def keep_decoded(self, file: DecodedFile) -> None:
        """As the other set."""
        self.parent.keep_decoded(file)

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images by their position in this subset, (B,) -> uint8 (B, C, H, W)."""
        return self.parent.images(self.indices[indices])


class Bordered(ImageSet):
    """Another set with ``border`` black pixels on every side of its images."""

    def __init__(self, parent: ImageSet, border: int) -> None:
        self.parent, self.border = parent, border
        self.labels, self.runs_own_code = parent.labels, parent.runs_own_code

    def keep_decoded(self, file: DecodedFile) -> None:
        """As the other set."""
        self.parent.keep_decoded(file)

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> uint8 (B, C, H + 2 border, W + 2 border)."""
        return F.pad(self.parent.images(indices), (self.border,) * 4)


@dataclass(frozen=True)
class Parts:
    """A data set as its distribution divides it; its fields are those of :class:`Splits`."""

    class_names: tuple[str, ...]
    train: ImageSet
    val: ImageSet | None = None
    test: ImageSet | None = None
    resources: tuple[Decoder, ...] = ()
    border: int = 0


@dataclass(frozen=True)
class Splits:
    """A data set, ready for training.

    Attributes:
        name: its name, as given.
        class_names: names of the classes, in the order of their labels.
        image_shape: channels, height and width of every image.
        train: images for updates.
        val: images for the choice of exits and settings; not for updates.
        test: images for the reported result; not for any choice. None if there are none.
        mean, std: per-channel statistics that normalise images scaled to [0, 1].
        flip: whether a mirrored image still belongs to its class.
        resources: closed by :meth:`close`.
        border: black pixels on every side of every image, part of its size.
        notes: lines about the data for the user.
        as_is: whether images are float tensors that are used as they are, neither normalised nor augmented.
        inputs: what each item has, if it is several inputs; images are their values then, (1, 1, N).
    """

    name: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    train: ImageSet
    val: ImageSet
    test: ImageSet | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    resources: tuple[Decoder, ...] = field(default=(), repr=False)
    border: int = 0
    notes: tuple[str, ...] = ()
    as_is: bool = False
    inputs: tuple[Input, ...] = ()

    def __post_init__(self) -> None:
        """Check the names of the classes, which are written into reports and files.

        Raises:
            DataError: there are over 100,000, or one holds control characters or is not UTF-8.
        """
        check_class_count(len(self.class_names), self.name)
        for name in self.class_names:
            if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
                raise DataError(
                    f"{self.name}: the class name {name[:50]!a} is not UTF-8 or holds control characters. Rename it."
                )

    def close(self) -> None:
        """Stop the decoding threads; reading images afterwards is an error."""
        for resource in self.resources:
            resource.close()


def resized(images: torch.Tensor, size: Sides) -> torch.Tensor:
    """Resize uint8 images (B, C, H, W) to (B, C, *size), bilinearly, with antialiasing when shrinking."""
    height, width = height_and_width(size)
    if images.shape[-2:] == (height, width):
        return images
    shrinks = height < images.shape[-2] or width < images.shape[-1]
    return F.interpolate(images, size=(height, width), mode="bilinear", antialias=shrinks)


def check_class_count(count: int, source: object) -> None:
    """Refuse more classes than any classifier has; each takes memory, here and in the network."""
    if count > MOST_CLASSES:
        raise DataError(f"{source}: {count:,} classes are more than {MOST_CLASSES:,}. Number the classes from 0.")


_DAMAGED = "The file is corrupt or belongs to another data set; download it again."


def check_labels(labels: np.ndarray, classes: int, source: object, advice: str = _DAMAGED) -> None:
    """Check that all labels (N,) lie in ``0 .. classes-1``; ``advice`` ends the error."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{source}: record {wrong[0]} has label {labels[wrong[0]]}, but labels go from 0 to {classes - 1}. {advice}"
        )
