"""Boxes: corners, intersection over union, and suppression of duplicates."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 64
"""Number of boxes that are compared with all others at once; it bounds the memory of suppression."""


def corners(boxes: Tensor) -> Tensor:
    """Left, top, right, bottom (..., 4) of boxes (..., 4) given by centre and size."""
    centre, half = boxes[..., :2], boxes[..., 2:4] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def pairwise_iou(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of boxes (..., P, 4) with boxes (..., M, 4): (..., P, M); 0 if both are empty."""
    a, b = corners(one)[..., :, None, :], corners(other)[..., None, :, :]
    width = torch.minimum(a[..., 2], b[..., 2]) - torch.maximum(a[..., 0], b[..., 0])
    height = torch.minimum(a[..., 3], b[..., 3]) - torch.maximum(a[..., 1], b[..., 1])
    shared = width.clamp(min=0) * height.clamp(min=0)
    areas = (one[..., 2] * one[..., 3])[..., :, None] + (other[..., 2] * other[..., 3])[..., None, :]
    return shared / (areas - shared).clamp(min=1e-12)


def shape_iou(sizes: Tensor, anchors: Tensor) -> Tensor:
    """Intersection over union of sizes (..., 2) with anchors (A, 2) at the same centre: (..., A)."""
    shared = torch.minimum(sizes[..., None, :], anchors).prod(dim=-1)
    return shared / (sizes.prod(dim=-1)[..., None] + anchors.prod(dim=-1) - shared).clamp(min=1e-12)


def suppressed(boxes: Tensor, classes: Tensor, overlap: float) -> Tensor:
    """Suppress boxes (K, 4), best first, that overlap a better one of their class (K,) by more than ``overlap``.

    Returns:
        Mask of the boxes that remain, (K,) bool.
    """
    count, better = len(boxes), torch.arange(len(boxes))
    remains = torch.ones(count, dtype=torch.bool)
    for first in range(0, count, _ROWS):
        rows = slice(first, first + _ROWS)
        same = (pairwise_iou(boxes[rows], boxes) > overlap) & (classes[rows, None] == classes)
        same &= better > better[rows, None]
        for offset, clashes in enumerate(same):
            if remains[first + offset]:
                remains &= ~clashes
    return remains
