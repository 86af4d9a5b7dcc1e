"""Augmentation and normalisation on a device: the same function of images and seed as :mod:`snugfit._data.transform`.

A processor takes longer to augment images of 224 pixels than a GPU takes to train on them. Here images are copied as
bytes, and whole batches are cropped by indices. A resized crop may differ from the processor's by one of 255 levels,
since that rounds after each of two passes; all else is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from snugfit._data.transform import (
    CROP_AREA,
    CROP_RATIO,
    ERASED_AREA,
    ERASED_RATIO,
    LARGEST_PADDED,
    PADDING,
    Transform,
    rectangles,
    uniforms,
)

_CHUNK_VALUES = 1 << 22
"""Values of images that are augmented at once: they take 5 bytes each besides the result."""


@dataclass(frozen=True)
class Placement:
    """Where images are transformed.

    Attributes:
        device: a device with a memory of its own.
        pinned: copy from pinned memory, so that the host does not wait until the device has finished its work.
    """

    device: torch.device
    pinned: bool

    def __call__(self, values: Tensor) -> Tensor:
        """The values, of any shape, on the device."""
        return (values.pin_memory() if self.pinned else values).to(self.device, non_blocking=self.pinned)


@dataclass(frozen=True)
class _Draws:
    """What is drawn for each image, (B, 1) float32, in pixels: crop, mirror image (0 or 1), and erased rectangle."""

    left: Tensor
    top: Tensor
    width: Tensor
    height: Tensor
    mirrored: Tensor
    erased: tuple[Tensor, Tensor, Tensor, Tensor]


def transform_on(
    place: Placement, transform: Transform, images: Tensor, train: bool, seed: int | Sequence[int], start: int
) -> Tensor:
    """Normalise uint8 images (B, C, H, W), and augment if ``train``, to float32 (B, C, H, W), channels-last.

    Args:
        place: the device.
        transform: what is done.
        images: in host memory.
        train: whether they are augmented.
        seed: of the augmentation, with
        start: the position of the first image.
    """
    size = images.shape[2:]
    numbers = [np.array([transform.mean, transform.std], np.float32) * 255]
    if train:
        numbers.append(_drawn(transform, (size[0], size[1]), uniforms(seed, start, len(images))))
    numbers_there = place(torch.from_numpy(np.concatenate([each.ravel() for each in numbers])))
    mean, std = numbers_there[: numbers[0].size].view(2, -1)
    pixels = place(images).permute(0, 2, 3, 1)
    output = torch.empty(pixels.shape, device=place.device)
    if train:
        draws = numbers_there[numbers[0].size :].view(-1, len(images), 1)
        step = max(1, _CHUNK_VALUES // images[0].numel())
        for first in range(0, len(images), step):
            rows = slice(first, first + step)
            _augment(transform, pixels[rows], _draws(draws[:, rows]), output[rows])
    else:
        output.copy_(pixels)
    output.sub_(mean).div_(std)
    if train and transform.erase:
        _erase(output, _draws(draws).erased)
    return output.permute(0, 3, 1, 2)


def _drawn(transform: Transform, size: tuple[int, int], draws: np.ndarray) -> np.ndarray:
    """The fields of :class:`_Draws` one after another, (9, B) float32, from uniform numbers (B, 12)."""
    nothing = np.zeros(len(draws))
    if not transform.crop:
        crop = [nothing, nothing, nothing + size[1], nothing + size[0]]
    elif max(size) <= LARGEST_PADDED:
        corners = np.floor(draws[:, :2] * (2 * PADDING + 1)).T
        crop = [*corners, nothing + size[1], nothing + size[0]]
    else:
        crop = list(rectangles(size, draws[:, :4], CROP_AREA, CROP_RATIO))
    mirrored = draws[:, 4] < 0.5 if transform.flip else nothing
    erased = np.stack(rectangles(size, draws[:, 6:10], ERASED_AREA, ERASED_RATIO)) * (draws[:, 5] < transform.erase)
    return np.stack([*crop, mirrored, *erased]).astype(np.float32)


def _draws(numbers: Tensor) -> _Draws:
    """The draws (9, B, 1) by name."""
    left, top, width, height, mirrored, *erased = numbers
    return _Draws(left, top, width, height, mirrored, (erased[0], erased[1], erased[2], erased[3]))


def _augment(transform: Transform, pixels: Tensor, draws: _Draws, output: Tensor) -> None:
    """Crop and mirror uint8 pixels (B, H, W, C) into the float output (B, H, W, C)."""
    height, width = output.shape[1:3]
    across = torch.arange(width, device=output.device).expand(len(output), -1)
    across, down = (
        torch.where(draws.mirrored > 0, width - 1 - across, across),
        torch.arange(height, device=output.device).expand(len(output), -1),
    )
    if transform.crop and max(height, width) > LARGEST_PADDED:
        _resize(pixels, _sources(down, draws.top, draws.height), _sources(across, draws.left, draws.width), output)
        return
    if transform.crop:
        pixels = F.pad(pixels, (0, 0, *(PADDING,) * 4))
    output.copy_(_at(pixels, down + draws.top.long(), across + draws.left.long()))


def _at(pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels (B, H', W', C) of images (B, H, W, C) at rows (B, H') and columns (B, W')."""
    image = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    return pixels[image, rows[:, :, None], columns[:, None, :]]


_Source = tuple[Tensor, Tensor]
"""Positions along an axis, (B, N) int64, and their share in the result, (B, N)."""


def _sources(places: Tensor, first: Tensor, length: Tensor) -> tuple[_Source, _Source]:
    """The two pixels of a crop that each place (B, N) of the result lies between, as torch's bilinear interpolation.

    The crop begins at ``first`` (B, 1) and has ``length`` (B, 1) pixels.
    """
    exact = ((places + 0.5) * (length / places.shape[1]) - 0.5).clamp_(min=0)
    lower = exact.floor()
    upper, share = torch.minimum(lower + 1, length - 1), exact - lower
    return ((first + lower).long(), 1 - share), ((first + upper).long(), share)


def _resize(pixels: Tensor, rows: tuple[_Source, _Source], columns: tuple[_Source, _Source], output: Tensor) -> None:
    """Interpolate uint8 pixels (B, H, W, C) into the float output (B, H, W, C), rounded to whole levels."""
    output.zero_()
    for row, row_share in rows:
        for column, column_share in columns:
            share = row_share[:, :, None] * column_share[:, None, :]
            output.add_(_at(pixels, row, column) * share[..., None])
    output.round_()


def _erase(output: Tensor, rectangle: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Set a rectangle of each image (B, H, W, C) to zero, in place."""
    left, top, width, height = rectangle
    down, across = (torch.arange(side, device=output.device) for side in output.shape[1:3])
    rows, columns = (down >= top) & (down < top + height), (across >= left) & (across < left + width)
    output.masked_fill_((rows[:, :, None] & columns[:, None, :])[..., None], 0)
