"""Average precision of several labels per image, from the logits of a whole split."""

from __future__ import annotations

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
    """Logits and targets of a split, (N, classes), in 5 bytes each; a block for each batch, so that none is moved."""

    def __init__(self, classes: int) -> None:
        self.classes, self._logits, self._targets = classes, list[Tensor](), list[Tensor]()

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add logits (B, classes), and targets (B, classes) of 0 and 1."""
        self._logits.append(logits.detach().to("cpu", torch.float32, copy=True))
        self._targets.append(targets.detach().to("cpu", torch.int8, copy=True))

    def __len__(self) -> int:
        return sum(map(len, self._logits))

    def per_class(self) -> list[float | None]:
        """Average precision of each class; None for one that no image has."""
        if not len(self):
            return [None] * self.classes
        return [self._of_class(each) for each in range(self.classes)]

    def _of_class(self, index: int) -> float | None:
        logits, targets = (torch.cat([block[:, index] for block in blocks]) for blocks in (self._logits, self._targets))
        return average_precision(logits, targets)


def bytes_of_scores(samples: int, classes: int) -> int:
    """Most memory of :class:`Scores` of so many samples, and of the average precision of one class at a time.

    An eighth is for whole pages, of which each block takes some.
    """
    return samples * (classes * 5 * 9 // 8 + 64)
