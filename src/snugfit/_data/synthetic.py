"""Splits of synthetic images, for plans and profiles without data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from snugfit._core.inputs import parse_inputs, shape_of
from snugfit._core.option_groups import SYNTHETIC, DataOptions
from snugfit._data.sets import ImageSet, Splits, check_class_count

TRAIN_COUNT = 10_000
"""Training images if ``--max-train`` is not given."""
VAL_SHARE = 10
"""Training images per validation image, and per test image, if ``--max-val`` is not given."""


class NoiseImages(ImageSet):
    """Noise, made when it is read; classes have equally many images, but for one. Only labels are stored."""

    def __init__(self, count: int, classes: int, shape: tuple[int, int, int], *, several: bool = False) -> None:
        labels = np.arange(count, dtype=np.int64) % classes
        self.labels = np.eye(classes, dtype=np.uint8)[labels] if several else labels
        self._shape = shape

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Make images, (B,) -> uint8 (B, C, H, W); the same ones for the same indices."""
        generator = torch.Generator().manual_seed(int(indices.sum()))
        return torch.randint(256, (len(indices), *self._shape), dtype=torch.uint8, generator=generator)


class NoiseInputs(NoiseImages):
    """The same of several inputs: their values (1, 1, N), of which those of integers count as 0, a valid index."""

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Make items, (B,) -> float32 (B, 1, 1, N); the same ones for the same indices."""
        return torch.randn((len(indices), *self._shape), generator=torch.Generator().manual_seed(int(indices.sum())))


def synthetic_splits(options: DataOptions) -> Splits:
    """Splits of the shape, classes and counts in ``options``.

    Raises:
        DataError: there are more classes than any classifier has.
    """
    text, classes = str(options.input_shape), options.classes or 1
    shape, inputs = shape_of(text), parse_inputs(text)
    check_class_count(classes, SYNTHETIC)
    train = options.max_train or TRAIN_COUNT
    val = options.max_val or max(1, train // VAL_SHARE)
    several = options.task == "multi-label"
    kind = NoiseInputs if inputs else NoiseImages
    first, second, third = (kind(count, classes, shape, several=several) for count in (train, val, val))
    names, half = tuple(map(str, range(classes))), (0.5,) * shape[0]
    plain = Splits(SYNTHETIC, names, shape, first, second, third, mean=half, std=half, flip=True)
    return replace(plain, flip=False, as_is=True, inputs=inputs) if inputs else plain
