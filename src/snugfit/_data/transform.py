"""Batched augmentation and normalisation, a pure function of images and seed.

Every image has its own draws from a counter-based generator, so that its view does not depend on the batch. They are
applied to bytes if possible, in torch: importing kornia for these few operations took 16 MiB in every process.

numpy.random loads lazily; importing it here keeps it out of a run's budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.random
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view

from snugfit._core.amounts import Sides, height_and_width
from snugfit.errors import DataError

_DRAWS = 12
PADDING = 4
LARGEST_PADDED = 64
CROP_AREA, CROP_RATIO = (0.35, 1.0), (3 / 4, 4 / 3)
ERASED_AREA, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)
_CHUNK_VALUES = 1 << 18


@dataclass(frozen=True)
class Transform:
    """Turns stored images into a network's input, augmented for training.

    Augmentation is a random crop with a 4-pixel black border up to 64 pixels, a random resized crop above; a mirror
    image with probability 1/2 if ``flip``; and a random rectangle set to the mean with probability ``erase``.

    Attributes:
        mean, std: per-channel statistics of images in [0, 1].
        flip: whether mirror images keep their class.
        erase: probability of random erasing.
        crop: whether augmentation crops.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
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
            crops = padded_crops if max(images.shape[-2:]) <= LARGEST_PADDED else resized_crops
            images = crops(images, draws[:, 0:4])
        if self.flip:
            images = mirror(images, draws[:, 4] < 0.5)
        output = normalize(images.float(), mean, std)
        erase(output, draws[:, 5:10], self.erase)
        return output


def uniforms(seed: int | Sequence[int], start: int, count: int) -> np.ndarray:
    """Uniform numbers (count, 12) of the positions ``start .. start+count-1`` in the stream of ``seed``."""
    parts = [seed] if isinstance(seed, int) else list(seed)
    key = np.random.SeedSequence([part & 0xFFFFFFFFFFFFFFFF for part in parts]).generate_state(2, np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=start * _DRAWS // 4))
    return generator.random((count, _DRAWS))


def normalize(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Subtract the mean (C,) from float images (B, C, H, W) and divide by the standard deviation (C,), in place."""
    return images.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


def mirror(images: torch.Tensor, chosen: np.ndarray) -> torch.Tensor:
    """Mirror the chosen (B,) of the images (B, C, H, W) left to right."""
    rows, mirrored = np.flatnonzero(chosen), images.numpy().copy()
    mirrored[rows] = mirrored[rows, ..., ::-1]
    return torch.from_numpy(mirrored)


def cut(
    images: torch.Tensor, left: np.ndarray, top: np.ndarray, width: np.ndarray, height: np.ndarray, size: Sides
) -> torch.Tensor:
    """Cut a rectangle out of each uint8 image (B, C, H, W) and resize it bilinearly to ``size``; others are (B,)."""
    output = torch.empty((*images.shape[:2], *height_and_width(size)), dtype=images.dtype)
    for i, image in enumerate(images):
        part = image[None, :, top[i] : top[i] + height[i], left[i] : left[i] + width[i]]
        fits = part.shape[-2:] == output.shape[-2:]
        output[i] = part[0] if fits else F.interpolate(part, output.shape[-2:], mode="bilinear")[0]
    return output


def padded_crops(images: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    """Crop each uint8 image (B, C, H, W) at a random position after padding it with 4 black pixels on every side."""
    left, top = np.floor(draws[:, :2] * (2 * PADDING + 1)).astype(np.int64).T
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    windows = sliding_window_view(padded, images.shape[-2:], axis=(2, 3))
    return torch.from_numpy(windows[np.arange(len(images)), :, top, left])


def resized_crops(images: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    """Cut a random rectangle out of each uint8 image (B, C, H, W) and resize it to H x W, bilinearly."""
    height, width = images.shape[-2:]
    return cut(images, *rectangles((height, width), draws, CROP_AREA, CROP_RATIO), (height, width))


def erase(images: torch.Tensor, draws: np.ndarray, probability: float) -> None:
    """Set a random rectangle of each image (B, C, H, W) to zero, in place, with the given probability."""
    sides = images.shape[-2], images.shape[-1]
    left, top, width, height = rectangles(sides, draws[:, 1:], ERASED_AREA, ERASED_RATIO)
    for i in np.flatnonzero(draws[:, 0] < probability):
        images[i, :, top[i] : top[i] + height[i], left[i] : left[i] + width[i]] = 0


def rectangles(
    sides: tuple[int, int], draws: np.ndarray, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Left, top, width and height (B,) inside images of this height and width; a ratio is relative to the image's."""
    most = sides[1], sides[0]
    areas = most[0] * most[1] * (area[0] + draws[:, 0] * (area[1] - area[0]))
    ratios = np.exp(np.log(ratio[0]) + draws[:, 1] * np.log(ratio[1] / ratio[0])) * (most[0] / most[1])
    width = np.clip(np.rint(np.sqrt(areas * ratios)), 1, most[0]).astype(np.int64)
    height = np.clip(np.rint(np.sqrt(areas / ratios)), 1, most[1]).astype(np.int64)
    left, top = (
        np.floor(draws[:, 2 + i] * (most[i] - side + 1)).astype(np.int64) for i, side in ((0, width), (1, height))
    )
    return left, top, width, height


@dataclass(frozen=True)
class Mix:
    """How the images of one step are mixed, by mixup or CutMix: each with the one before it, and so are their targets.

    All images of a step share one draw. The partner is the image before in the step, the last one for the first, as in
    torchvision's ``MixUp`` and ``CutMix``; so a micro-batch needs only one image of another one, and mixes as the whole
    batch does.

    Attributes:
        share: of the image itself in its target; the rest is that of its partner.
        box: top, bottom, left and right of the pixels that come from the partner; None to blend all pixels.
    """

    share: float
    box: tuple[int, int, int, int] | None = None

    def images(self, images: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Mix float images (B, C, H, W) in place, each with the one before; the first with ``before`` (C, H, W)."""
        for row in reversed(range(len(images))):
            self._mix(images[row], images[row - 1] if row else before)
        return images

    def _mix(self, image: torch.Tensor, partner: torch.Tensor) -> None:
        """Mix an image (C, H, W) in place with its partner (C, H, W)."""
        if self.box is None:
            image.lerp_(partner, 1 - self.share)
        else:
            top, bottom, left, right = self.box
            image[:, top:bottom, left:right] = partner[:, top:bottom, left:right]

    def targets(self, labels: torch.Tensor, before: torch.Tensor, classes: int) -> torch.Tensor:
        """Probabilities (B, classes) of labels (B,), or (B, classes) float32; the first follows ``before`` (1, ...)."""
        partners = torch.cat([before, labels[:-1]])
        own, other = (each if each.dim() > 1 else F.one_hot(each, classes).float() for each in (labels, partners))
        return own.mul(self.share).add_(other, alpha=1 - self.share)


@dataclass(frozen=True)
class Mixing:
    """Draws how the images of a step are mixed; with both parameters one of the two at random, at equal chances.

    Attributes:
        classes: number of classes.
        mixup, cutmix: parameters alpha of the Beta distributions of shares; None leaves that kind out.
    """

    classes: int
    mixup: float | None = None
    cutmix: float | None = None

    def draw(self, seed: Sequence[int], height: int, width: int) -> Mix:
        """How images of this size in pixels are mixed in the step of this seed.

        Zhang et al., mixup (ICLR 2018), equation 1; Yun et al., CutMix (ICCV 2019), equation 2: a box beyond the border
        is cut off, and the share is that of the pixels that are left.
        """
        rng = np.random.default_rng(tuple(seed))
        kinds = [(kind, alpha) for kind, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)) if alpha is not None]
        kind, alpha = kinds[int(rng.integers(len(kinds)))]
        share = float(rng.beta(alpha, alpha))
        if kind == "mixup":
            return Mix(share)
        side = 0.5 * np.sqrt(1 - share)
        edges: list[int] = []
        for size in (height, width):
            centre, half = int(rng.integers(size)), int(side * size)
            edges += [max(centre - half, 0), min(centre + half, size)]
        top, bottom, left, right = edges
        return Mix(1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))
