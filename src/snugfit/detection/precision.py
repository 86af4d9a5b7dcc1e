"""Mean average precision at an overlap of 0.5, with all-point interpolation (PASCAL VOC from 2010 on)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from snugfit.detection.boxes import pairwise_iou
from snugfit.detection.decoding import Detections

OVERLAP = 0.5
THRESHOLD = 0.005
"""Smallest score of boxes that count; darknet's value for validation."""


def true_positives(found: Detections, truths: Tensor) -> np.ndarray:
    """Which of the K boxes of one image are true positives: the first to find an object of their class; (K,) bool.

    As in VOC's script, a box is compared with the object that it overlaps most. If that object was found before, the
    box is a false positive, whatever else it overlaps.

    Args:
        found: the boxes, by falling score.
        truths: (M, 5): class, box; rows of class -1 are no objects.
    """
    correct = np.zeros(len(found.boxes), dtype=bool)
    if not len(found.boxes) or not len(truths):
        return correct
    overlaps = pairwise_iou(found.boxes.to(truths.dtype), truths[:, 1:])
    same = found.classes[:, None] == truths[:, 0]
    best = (overlaps * same).max(dim=1)
    taken = set[int]()
    for place, (overlap, truth) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        if overlap >= OVERLAP and truth not in taken:
            taken.add(truth)
            correct[place] = True
    return correct


def average_precision(scores: np.ndarray, correct: np.ndarray, objects: int) -> float:
    """Area under the monotone precision over recall of the boxes of one class.

    Args:
        scores: of every box (K,), in any order; of equal scores the first ranks higher.
        correct: whether each box is a true positive, (K,).
        objects: number of objects, at least 1.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(correct[order])
    precision = hits / np.arange(1, len(hits) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    return float(precision[correct[order]].sum() / objects)


class MeanAveragePrecision:
    """Mean average precision of all images; keeps 7 bytes per box."""

    def __init__(self, classes: int) -> None:
        self.objects = np.zeros(classes, dtype=np.int64)
        self._found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # scores, classes, true positives

    def add(self, found: Detections, truths: Tensor) -> None:
        """Add an image: its K boxes, and its objects (M, 5)."""
        real = truths[truths[:, 0] >= 0]
        self.objects += np.bincount(real[:, 0].long().numpy(), minlength=len(self.objects))
        classes = found.classes.to(torch.int16).numpy()
        self._found.append((found.scores.float().numpy(), classes, true_positives(found, real)))

    @property
    def per_class(self) -> list[float | None]:
        """Average precision of each class; None for a class without objects."""
        if not self._found:
            return [None] * len(self.objects)
        scores, classes, correct = (np.concatenate(each) for each in zip(*self._found, strict=True))
        return [
            average_precision(scores[classes == label], correct[classes == label], int(count)) if count else None
            for label, count in enumerate(self.objects)
        ]

    @property
    def value(self) -> float:
        """Mean over the classes that have objects, in [0, 1]; 0 if there are none."""
        known = [each for each in self.per_class if each is not None]
        return sum(known) / len(known) if known else 0.0
