"""Anchors: sizes of boxes that predictions are relative to (YOLOv2, section 2, "Dimension Clusters")."""

from __future__ import annotations

import numpy as np

Anchors = tuple[tuple[float, float], ...]

_CELLS = ((0.57273, 0.677385), (1.87446, 2.06253), (3.33843, 5.47434), (7.88282, 3.52778), (9.77052, 9.16828))
COCO_ANCHORS: Anchors = tuple((width / 13, height / 13) for width, height in _CELLS)
"""Widths and heights of darknet's ``yolov2.cfg`` as fractions; darknet has them in cells of a 13x13 feature map."""

_LARGEST = 20_000
_ROUNDS = 100
_SMALLEST = 1e-3


def anchors_for(sizes: np.ndarray, count: int) -> Anchors:
    """Cluster the sizes of training boxes by k-means with the distance 1 - IoU; without boxes, the published anchors.

    It starts at evenly spread quantiles of the area, so that the same boxes always give the same anchors. Of more than
    20,000 boxes a regular sample is used.

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
    places = (np.arange(count) + 0.5) * len(sizes) / count
    centres = sizes[places.astype(np.int64)]
    for _ in range(_ROUNDS):
        nearest = iou(sizes, centres).argmax(axis=1)
        moved = np.stack([_mean(sizes[nearest == i], centres[i]) for i in range(count)])
        if np.allclose(moved, centres, rtol=0, atol=1e-7):
            break
        centres = moved
    ordered = centres[np.argsort(centres.prod(axis=1), kind="stable")]
    return tuple((round(float(width), 6), round(float(height), 6)) for width, height in ordered)


def iou(sizes: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Intersection over union of sizes (N, 2) with centres (K, 2), at the same centre: (N, K)."""
    shared = np.minimum(sizes[:, None], centres).prod(axis=2)
    together = sizes.prod(axis=1)[:, None] + centres.prod(axis=1)
    overlap: np.ndarray = shared / (together - shared)
    return overlap


def _mean(sizes: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    return sizes.mean(axis=0) if len(sizes) else otherwise
