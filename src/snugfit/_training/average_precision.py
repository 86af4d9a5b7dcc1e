"""Average precision of several labels per image, from the logits of a whole split."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor


def average_precision(scores: Tensor, targets: Tensor) -> float | None:
    """Area under the steps of precision over recall, for scores (N,) and targets (N,), 0 or 1; None without a 1.

    It is the sum of ``(recall_n - recall_(n-1)) * precision_n`` over the thresholds at which scores differ, as in
    scikit-learn's ``average_precision_score``.
    """
    scores, order = scores.sort(descending=True)
    found = targets[order].double().cumsum(0)
    if not len(found) or not found[-1]:
        return None
    last = torch.ones(len(scores), dtype=torch.bool)
    torch.ne(scores[1:], scores[:-1], out=last[:-1])
    places = last.nonzero()[:, 0]
    found = found[places]
    gained = found.diff(prepend=found.new_zeros(1)) / found[-1]
    return float((gained * found / (places + 1)).sum())


class Scores:
    """Logits and targets of a split, (N, classes), kept in 5 bytes each, and in an eighth more while they grow."""

    def __init__(self, classes: int) -> None:
        self.classes, self._logits, self._targets = classes, array("f"), array("b")

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add logits (B, classes), and targets (B, classes) of 0 and 1."""
        self._logits.frombytes(logits.float().numpy().tobytes())
        self._targets.frombytes(targets.to(torch.int8).numpy().tobytes())

    def __len__(self) -> int:
        return len(self._logits) // self.classes

    def per_class(self) -> list[float | None]:
        """Average precision of each class; None for one that no image has."""
        if not len(self):
            return [None] * self.classes
        shape = (len(self), self.classes)
        logits = torch.frombuffer(self._logits, dtype=torch.float32).view(shape)
        targets = torch.frombuffer(self._targets, dtype=torch.int8).view(shape)
        return [average_precision(logits[:, each], targets[:, each]) for each in range(self.classes)]


def bytes_of_scores(samples: int, classes: int) -> int:
    """Most memory of :class:`Scores` of so many samples, and of the average precision of one class at a time."""
    return samples * (classes * 5 * 9 // 8 + 64)
