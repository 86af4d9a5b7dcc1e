"""Augmentation of images with boxes: a random crop, a mirror image, and darknet's changes of colour.

As in :mod:`snugfit._data.transform`, every image has its own draws, so that its view does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from snugfit._data.boxes import BOX, CLASS, NONE
from snugfit._data.transform import Transform, cut, mirror, normalize, uniforms

JITTER = 0.2
"""Largest share of a side that a crop removes at each end; darknet's ``jitter``."""
HUE, SATURATION, EXPOSURE = 0.1, 1.5, 1.5
"""Darknet's ``hue`` (of the whole circle), and factors of ``saturation`` and ``exposure`` (or one over them)."""
_LEAST_LEFT = 0.1
"""Smallest share of a box inside a crop; with less, the object is dropped (ultralytics' value)."""
_CHUNK_VALUES = 1 << 18


@dataclass(frozen=True)
class BoxTransform:
    """Turns stored images into a network's input, augmented for training together with their boxes."""

    plain: Transform

    def __call__(
        self, images: torch.Tensor, targets: np.ndarray, train: bool, seed: Sequence[int], start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise uint8 images (B, C, S, S), and augment them and their targets (B, M, 5) if ``train``.

        Returns:
            float32 (B, C, S, S), channels-last, and targets (B, M, 5) float32; a box that is cropped away becomes
            padding.
        """
        targets = targets.astype(np.float32, copy=True)
        if not train:
            return self.plain(images), torch.from_numpy(targets)
        output = torch.empty(images.shape, dtype=torch.float32, memory_format=torch.channels_last)
        mean, std = torch.tensor(self.plain.mean), torch.tensor(self.plain.std)
        step = max(1, _CHUNK_VALUES // images[0].numel())
        for first in range(0, len(images), step):
            rows = slice(first, first + step)
            chunk = images[rows]
            draws = uniforms(seed, start + first, len(chunk))
            if self.plain.crop:
                chunk = cropped(chunk, targets[rows], draws[:, 0:4])
            if self.plain.flip:
                chunk = mirrored(chunk, targets[rows], draws[:, 4] < 0.5)
            strip = max(1, _CHUNK_VALUES // chunk[:, :, 0].numel())  # large images in parts, to save memory
            for top in range(0, chunk.shape[2], strip):
                part = recoloured(chunk[:, :, top : top + strip].float() / 255, draws[:, 5:10])
                output[rows, :, top : top + strip] = normalize(part, mean, std)
        return output, torch.from_numpy(targets)


def cropped(images: torch.Tensor, targets: np.ndarray, draws: np.ndarray) -> torch.Tensor:
    """Remove a random share of up to 0.2 from each side of uint8 images (B, C, S, S), and resize the rest to S x S.

    Targets (B, M, 5) change in place; ``draws`` (B, 4) lie in [0, 1).
    """
    size = images.shape[-1]
    left, top, right, bottom = np.floor(draws * (JITTER * size + 1)).astype(np.int64).T
    width, height = size - left - right, size - top - bottom
    _follow(targets, np.stack([left, top], 1) / size, np.stack([width, height], 1) / size)
    return cut(images, left, top, width, height, size)


def mirrored(images: torch.Tensor, targets: np.ndarray, chosen: np.ndarray) -> torch.Tensor:
    """Mirror the chosen (B,) of the images (B, C, S, S) and, in place, their boxes (B, M, 5)."""
    turned = chosen[:, None] & (targets[..., CLASS] != NONE)
    targets[..., 1] = np.where(turned, 1 - targets[..., 1], targets[..., 1])
    return mirror(images, chosen)


def recoloured(images: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    """Change hue, saturation and brightness of images (B, 3, S, S) in [0, 1]; of grey ones (B, 1, S, S) the brightness.

    ``draws`` in [0, 1), (B, 5), are hue; saturation, and whether it goes up; brightness, and whether it goes up.
    """
    numbers = torch.from_numpy(draws).to(images.dtype).view(len(images), 5, 1, 1)
    saturation, exposure = (
        torch.where(numbers[:, up] < 0.5, 1 + numbers[:, by] * (most - 1), 1 / (1 + numbers[:, by] * (most - 1)))
        for by, up, most in ((1, 2, SATURATION), (3, 4, EXPOSURE))
    )
    if images.shape[1] == 1:
        return (images * exposure[:, None]).clamp(max=1)
    hue, grey, value = rgb_to_hsv(images)
    hue = hue + (numbers[:, 0] * 2 - 1) * HUE * 6
    return hsv_to_rgb(hue, (grey * saturation).clamp_(max=1), (value * exposure).clamp_(max=1))


def rgb_to_hsv(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hue in sixths of the circle, saturation and value, each (B, S, S), of images (B, 3, S, S) in [0, 1]."""
    value, range_ = images.amax(1), images.amax(1) - images.amin(1)
    red, green, blue = images.unbind(1)
    divisor = range_.where(range_ > 0, 1)
    others = torch.where(green == value, (blue - red) / divisor + 2, (red - green) / divisor + 4)
    hue = torch.where(red == value, (green - blue) / divisor, others) % 6
    return hue, range_ / value.where(value > 0, 1), value


def hsv_to_rgb(hue: torch.Tensor, saturation: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Images (B, 3, S, S) in [0, 1] of hue in sixths of the circle, saturation and value, each (B, S, S)."""
    range_ = value * saturation
    steps = ((hue + start) % 6 for start in (5, 3, 1))
    return torch.stack([value - range_ * torch.minimum(step, 4 - step).clamp_(0, 1) for step in steps], dim=1)


def _follow(targets: np.ndarray, corner: np.ndarray, share: np.ndarray) -> None:
    """Adapt boxes (B, M, 5) in place to a crop of ``share`` (B, 2) of the sides from ``corner`` (B, 2) on."""
    boxes = targets[..., BOX]
    low = ((boxes[..., :2] - boxes[..., 2:] / 2) - corner[:, None]) / share[:, None]
    high = ((boxes[..., :2] + boxes[..., 2:] / 2) - corner[:, None]) / share[:, None]
    inner_low, inner_high = low.clip(0, 1), high.clip(0, 1)
    left = (inner_high - inner_low).prod(axis=2) >= _LEAST_LEFT * (high - low).prod(axis=2)
    real = (targets[..., CLASS] != NONE) & left
    targets[..., CLASS] = np.where(real, targets[..., CLASS], NONE)
    moved = np.concatenate([(inner_low + inner_high) / 2, inner_high - inner_low], axis=2)
    targets[..., BOX] = np.where(real[..., None], moved, 0)
