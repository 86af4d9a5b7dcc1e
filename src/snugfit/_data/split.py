"""Deterministic, stratified division of labelled images into splits. Pure functions of labels and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from snugfit._core.amounts import Sides, parse_sides
from snugfit._core.options import ImageSize, checked
from snugfit._data.multi_label import strata
from snugfit._data.sets import ImageSet, Parts, Splits, Subset
from snugfit.errors import DataError, UsageError


@dataclass(frozen=True)
class SplitOptions:
    """How a data set is read and divided.

    Attributes:
        image_size: side of the images in pixels, or their height and width; the data set's own by default.
        classes: expected number of classes.
        max_train: class-balanced limit of training images; it does not change the division.
        max_val: class-balanced limit of validation and of test images.
        val_fraction: share of the images that validation gets if the data set has no validation part.
        seed: seed of the division and of the choice within the limits.
    """

    image_size: Sides | str | None = None
    classes: int | None = None
    max_train: int | None = None
    max_val: int | None = None
    val_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers; one that makes no sense is a ``UsageError``."""
        for option, value in (("training", self.max_train), ("validation", self.max_val)):
            if value is not None and value < 1:
                raise UsageError(f"the largest number of {option} images must be at least 1, not {value}.")
        if not 0 < self.val_fraction < 0.5:
            raise UsageError(f"the validation fraction must lie between 0 and 0.5, not {self.val_fraction}.")
        checked("image_size", ImageSize | None, self.image_size)

    @property
    def sides(self) -> Sides | None:
        """The image size as numbers; None for the data set's own."""
        size = checked("image_size", ImageSize | None, self.image_size)
        return None if size is None else parse_sides(size)


def stratified(
    labels: np.ndarray, fractions: Sequence[float], seed: int, class_names: Sequence[str] = ()
) -> list[np.ndarray]:
    """Divide images with labels (N,) so that every part has every class in the same proportion, at least one of each.

    Returns:
        Sorted indices of the first part, which gets the rest, then of one part per fraction.

    Raises:
        DataError: a class has fewer images than there are parts.
    """
    rng = np.random.default_rng(seed & 0xFFFFFFFF)
    parts: list[list[np.ndarray]] = [[] for _ in range(len(fractions) + 1)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        if len(members) < len(parts):
            name = class_names[label] if class_names else label
            raise DataError(
                f"class '{name}' has {len(members)} image(s), too few to divide into {len(parts)} parts. "
                "Add images to it or remove the class."
            )
        start = 0
        for part, fraction in zip(parts[1:], fractions, strict=True):
            count = min(max(1, round(fraction * len(members))), len(members) - start - 1)
            part.append(members[start : start + max(count, 1)])
            start += max(count, 1)
        parts[0].append(members[start:])
    return [np.sort(np.concatenate(part)) for part in parts]


def balanced(labels: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """Choose ``limit`` images with as equal class counts as possible; a smaller limit chooses a subset of a larger one.

    Returns:
        Sorted indices, (min(limit, N),) int64.
    """
    rng = np.random.default_rng(seed & 0xFFFFFFFF)
    order = rng.permutation(len(labels))
    rank = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        rank[members] = np.arange(len(members))
    tie = rng.random(int(labels.max()) + 1)[labels]
    return np.sort(np.lexsort((tie, rank))[:limit])


def assemble(
    name: str,
    parts: Parts,
    options: SplitOptions,
    *,
    image_shape: tuple[int, int, int],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    flip: bool,
) -> Splits:
    """Divide a data set's parts into splits, then limit them; limits do not move an image to another split."""
    count, expected = len(parts.class_names), options.classes
    if expected is not None and expected != count:
        raise DataError(f"'{name}' has {count} classes, not {expected}. Ask for {count} or choose another data set.")
    train, val, test = _divide(parts, options.val_fraction, options.seed)
    return Splits(
        name,
        parts.class_names,
        image_shape,
        train=_limited(train, options.max_train, options.seed),
        val=_limited(val, options.max_val, options.seed),
        test=None if test is None else _limited(test, options.max_val, options.seed),
        mean=mean,
        std=std,
        flip=flip,
        resources=parts.resources,
        border=parts.border,
    )


def limited(found: Splits, options: SplitOptions) -> Splits:
    """The splits with at most as many images as options say."""
    train = _limited(found.train, options.max_train, options.seed)
    val = _limited(found.val, options.max_val, options.seed)
    test = None if found.test is None else _limited(found.test, options.max_val, options.seed)
    return replace(found, train=train, val=val, test=test)


def _divide(parts: Parts, val_fraction: float, seed: int) -> tuple[ImageSet, ImageSet, ImageSet | None]:
    if parts.val is not None:
        return parts.train, parts.val, parts.test
    fractions = [val_fraction] if parts.test is not None else [val_fraction, val_fraction]
    groups = strata(parts.train.labels, len(fractions) + 1)
    names = () if parts.train.has_several_labels else parts.class_names
    indices = stratified(groups, fractions, seed, names)
    train, val, *rest = (Subset(parts.train, chosen) for chosen in indices)
    return train, val, rest[0] if rest else parts.test


def _limited(images: ImageSet, limit: int | None, seed: int) -> ImageSet:
    if limit is None or limit >= len(images):
        return images
    return Subset(images, balanced(strata(images.labels), limit, seed))
