"""Images that a caller's data set has prepared itself: float tensors of any size, which are used as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from snugfit._data.sets import ImageSet
from snugfit._data.transform import Transform
from snugfit.errors import DataError


@dataclass(eq=False)
class PreparedImages(ImageSet):
    """Images of a map-style data set, read one by one in the caller's thread.

    Attributes:
        sample: the image, float (C, H, W), and the label of an item.
        labels: (N,) int64, or (N, classes) uint8.
        shape: (C, H, W) of every image.
    """

    sample: Callable[[int], tuple[Any, Any]]
    labels: np.ndarray
    shape: tuple[int, int, int]

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> float32 (B, C, H, W) in channels_last."""
        batch = torch.empty((len(indices), *self.shape), memory_format=torch.channels_last)
        for row, index in enumerate(indices):
            image = self.sample(int(index))[0]
            self._check(image, int(index))
            batch[row] = image
        return batch

    def _check(self, image: Any, index: int) -> None:
        shape = prepared_shape(image, index)
        if shape != self.shape:
            raise DataError(f"image {index} has shape {shape}, but the first has {self.shape}. Resize them to one.")
        if not torch.isfinite(image).all():
            raise DataError(f"image {index} holds NaN or infinite values. Replace or remove it.")


def prepared_shape(image: Any, index: int) -> tuple[int, int, int]:
    """Channels, height and width of an image; raises DataError if it is no float tensor (C, H, W)."""
    if not (isinstance(image, torch.Tensor) and image.is_floating_point() and image.ndim == 3 and image.numel()):
        is_ = f"of {image.dtype} and shape {tuple(image.shape)}" if isinstance(image, torch.Tensor) else type(image)
        raise DataError(f"image {index} is {is_}; as_is=True takes float tensors of (channels, height, width).")
    channels, height, width = image.shape
    return channels, height, width


class AsIs(Transform):
    """Leaves prepared images as they are."""

    def __call__(
        self, images: torch.Tensor, train: bool = False, seed: int | Sequence[int] = 0, start: int = 0
    ) -> torch.Tensor:
        """The images, float32 (B, C, H, W); nothing is augmented."""
        return images
