"""Batched augmentation and normalisation with kornia, a pure function of images and seed.

kornia's augmentation classes draw from torch's global generator once per batch, so that an image's augmentation would
depend on the batch it is in. Here every image has its own draws from a counter-based generator and kornia's functions
apply them, to bytes if possible: the view does not depend on the batch size, and takes less memory and time.

numpy.random and torch.onnx (which kornia touches) load lazily; importing them here keeps them out of a run's budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.random
import torch
import torch.nn.functional as F
import torch.onnx
from kornia.enhance import normalize
from kornia.geometry.transform import crop_by_indices, hflip

from snugfit.errors import DataError

_DRAWS = 12
_PADDING = 4
_LARGEST_PADDED = 64
_CROP_AREA, _CROP_RATIO = (0.35, 1.0), (3 / 4, 4 / 3)
_ERASED_AREA, _ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)
_CHUNK_VALUES = 1 << 18


@dataclass(frozen=True)
class Transform:
    """Turns stored images into a network's input, augmented for training.

    Augmentation is a random crop with a 4-pixel black border up to 64 pixels, a random resized crop above; a mirror
    image with probability 1/2 if ``flip``; and a random rectangle set to the mean with probability ``erase``.

    Attributes:
        mean, std: per-channel statistics of images in [0, 1].
        image_size: side of the output in pixels.
        flip: whether mirror images keep their class.
        erase: probability of random erasing.
        crop: whether augmentation crops.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    flip: bool
    erase: float = 0.0
    crop: bool = True

    def __call__(
        self, images: torch.Tensor, train: bool = False, seed: int | Sequence[int] = 0, start: int = 0
    ) -> torch.Tensor:
        """Normalise uint8 images (B, C, H, W), and augment if ``train``, to float32 (B, C, H, W), channels-last.

        The seed and the position ``start`` of the first image determine the augmentation: ``f(x, start=0)[2:]`` equals
        ``f(x[2:], start=2)``. torch's and numpy's global state play no part.
        """
        if images.shape[1] != len(self.mean):
            raise DataError(f"the images have {images.shape[1]} channel(s), not {len(self.mean)}.")
        mean, std = torch.tensor(self.mean) * 255, torch.tensor(self.std) * 255
        output = torch.empty(images.shape, dtype=torch.float32, memory_format=torch.channels_last)
        step = max(1, _CHUNK_VALUES // images[0].numel()) if len(images) else 1
        for first in range(0, len(images), step):
            chunk = images[first : first + step]
            if train:
                draws = uniforms(seed, start + first, len(chunk))
                output[first : first + step] = self._augmented(chunk, draws, mean, std)
            else:
                output[first : first + step] = normalize(chunk.float(), mean, std)
        return output

    def _augmented(
        self, images: torch.Tensor, draws: np.ndarray, mean: torch.Tensor, std: torch.Tensor
    ) -> torch.Tensor:
        if self.crop:
            crops = padded_crops if images.shape[-1] <= _LARGEST_PADDED else resized_crops
            images = crops(images, draws[:, 0:4])
        if self.flip:
            images = torch.where(torch.from_numpy(draws[:, 4] < 0.5).view(-1, 1, 1, 1), hflip(images), images)
        output = normalize(images.float(), mean, std)
        erase(output, draws[:, 5:10], self.erase)
        return output


def uniforms(seed: int | Sequence[int], start: int, count: int) -> np.ndarray:
    """Uniform numbers (count, 12) of the positions ``start .. start+count-1`` in the stream of ``seed``."""
    parts = [seed] if isinstance(seed, int) else list(seed)
    key = np.random.SeedSequence([part & 0xFFFFFFFFFFFFFFFF for part in parts]).generate_state(2, np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=start * _DRAWS // 4))
    return generator.random((count, _DRAWS))


def padded_crops(images: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    """Crop each uint8 image (B, C, S, S) at a random position after padding it with 4 black pixels on every side."""
    size = images.shape[-1]
    left, top = np.floor(draws[:, :2] * (2 * _PADDING + 1)).astype(np.int64).T
    side = np.full(len(images), size)
    return crop_by_indices(F.pad(images, (_PADDING,) * 4), corners(left, top, side, side), (size, size))


def resized_crops(images: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    """Cut a random rectangle out of each uint8 image (B, C, S, S) and resize it to S x S, bilinearly."""
    size = images.shape[-1]
    left, top, width, height = _rectangles(size, draws, _CROP_AREA, _CROP_RATIO)
    return crop_by_indices(images, corners(left, top, width, height), (size, size))


def erase(images: torch.Tensor, draws: np.ndarray, probability: float) -> None:
    """Set a random rectangle of each image (B, C, S, S) to zero, in place, with the given probability.

    In place because kornia's erasing builds a mask and a copy of the whole batch.
    """
    left, top, width, height = _rectangles(images.shape[-1], draws[:, 1:], _ERASED_AREA, _ERASED_RATIO)
    for i in np.flatnonzero(draws[:, 0] < probability):
        images[i, :, top[i] : top[i] + height[i], left[i] : left[i] + width[i]] = 0


def _rectangles(
    size: int, draws: np.ndarray, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    areas = size * size * (area[0] + draws[:, 0] * (area[1] - area[0]))
    ratios = np.exp(np.log(ratio[0]) + draws[:, 1] * np.log(ratio[1] / ratio[0]))
    width = np.clip(np.rint(np.sqrt(areas * ratios)), 1, size).astype(np.int64)
    height = np.clip(np.rint(np.sqrt(areas / ratios)), 1, size).astype(np.int64)
    left, top = (
        np.floor(draws[:, 2 + i] * (size - side + 1)).astype(np.int64) for i, side in ((0, width), (1, height))
    )
    return left, top, width, height


def corners(left: np.ndarray, top: np.ndarray, width: np.ndarray, height: np.ndarray) -> torch.Tensor:
    """Corners (B, 4, 2) of rectangles, clockwise from the upper left one; all arguments are (B,), in pixels."""
    right, bottom = left + width - 1, top + height - 1
    xs, ys = np.stack((left, right, right, left), axis=1), np.stack((top, top, bottom, bottom), axis=1)
    return torch.from_numpy(np.stack((xs, ys), axis=2))
