"""Boxes: corners, overlaps, non-maximum suppression, and the sizes of anchors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

Anchors = tuple[tuple[float, float], ...]

_CELLS = ((0.57273, 0.677385), (1.87446, 2.06253), (3.33843, 5.47434), (7.88282, 3.52778), (9.77052, 9.16828))
COCO_ANCHORS: Anchors = tuple((width / 13, height / 13) for width, height in _CELLS)
"""Widths and heights of darknet's ``yolov2.cfg`` as fractions; darknet has them in cells of a 13x13 feature map."""

_ROWS = 64
"""Number of boxes that are compared with all others at once; it bounds the memory of the suppression."""
_LARGEST = 20_000
_ROUNDS = 100
_SMALLEST = 1e-3


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


def non_maximum_suppression(boxes: Tensor, classes: Tensor, overlap: float) -> Tensor:
    """Suppress boxes (K, 4), best first, that overlap a better one of their class (K,) by more than ``overlap``.

    Returns:
        Mask of the boxes that remain, (K,) bool.
    """
    count, ranks = len(boxes), torch.arange(len(boxes))
    remains = torch.ones(count, dtype=torch.bool)
    for first in range(0, count, _ROWS):
        rows = slice(first, first + _ROWS)
        overlapping = (pairwise_iou(boxes[rows], boxes) > overlap) & (classes[rows, None] == classes)
        overlapping &= ranks > ranks[rows, None]
        for offset, worse in enumerate(overlapping):
            if remains[first + offset]:
                remains &= ~worse
    return remains


def anchors_for(sizes: np.ndarray, count: int) -> Anchors:
    """Cluster the sizes of training boxes by k-means with the distance 1 - IoU (YOLOv2, section 2).

    It starts at evenly spread quantiles of the area, so that the same boxes always give the same anchors. Of more than
    20,000 boxes a regular sample is used; without boxes, the published anchors are.

    Args:
        sizes: widths and heights as fractions of the image's sides, (N, 2).
        count: number of anchors.

    Returns:
        Widths and heights, in the order of their area.
    """
    if not len(sizes):
        return tuple(COCO_ANCHORS[i % len(COCO_ANCHORS)] for i in range(count))
    sizes = np.asarray(sizes, dtype=np.float64)[:: -(-len(sizes) // _LARGEST)]
    sizes = np.maximum(sizes[np.argsort(sizes.prod(axis=1), kind="stable")], _SMALLEST)
    centres = sizes[((np.arange(count) + 0.5) * len(sizes) / count).astype(np.int64)]
    for _ in range(_ROUNDS):
        nearest = shape_iou(torch.from_numpy(sizes), torch.from_numpy(centres)).argmax(dim=-1).numpy()
        members = [sizes[nearest == i] for i in range(count)]
        moved = np.stack([each.mean(axis=0) if len(each) else centres[i] for i, each in enumerate(members)])
        if np.allclose(moved, centres, rtol=0, atol=1e-7):
            break
        centres = moved
    ordered = centres[np.argsort(centres.prod(axis=1), kind="stable")]
    return tuple((round(float(width), 6), round(float(height), 6)) for width, height in ordered)
