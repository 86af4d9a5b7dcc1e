"""Targets that a loss leaves out of its mean, which means of micro-batches would weight differently."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from snugfit._training.losses import Loss, difference_from_mean, random_outputs
from snugfit.errors import MEMORY_ERRORS, is_out_of_memory

_USUAL = -100
"""What torch's cross entropy ignores."""


def ignored_target(loss: Loss) -> int | None:
    """The target that a loss leaves out of its mean, as far as this can be seen; None without one."""
    given = loss.keywords if isinstance(loss, partial) else {}
    function = loss.func if isinstance(loss, partial) else loss
    usual = _USUAL if function in (nn.functional.cross_entropy, nn.functional.nll_loss) else None
    found: int | None = given.get("ignore_index", getattr(function, "ignore_index", usual))
    return found


class IgnoredTargets:
    """Finds ignored targets in batches, also of a loss that does not show what it ignores.

    Args:
        loss: from outputs (B, *shape), of the type and device of ``like`` (any shape), to the mean.
        shape: of the network's output for one image.
        like: any tensor of the network.
    """

    def __init__(self, loss: Loss, shape: tuple[int, ...], like: Tensor) -> None:
        self._loss, self._shape, self._like = loss, shape, like
        self._ignored = ignored_target(loss)
        self._takes_all = False

    def among(self, targets: Tensor) -> int | None:
        """One of these targets (B, ...) that the loss ignores; None without any."""
        if self._ignored is None and not self._takes_all and not targets.is_floating_point():
            self._try(targets)
        return self._ignored if self._ignored is not None and bool((targets == self._ignored).any()) else None

    def _try(self, targets: Tensor) -> None:
        """Try the loss on integers (B, ...) that are no classes, if there are any: does it ignore them?"""
        if len(self._shape) == 0 or self._shape[0] < 2 or targets.shape[1:] != self._shape[1:]:
            return  # these are no labels of classes
        strange = (targets < 0) | (targets >= self._shape[0])
        counts = strange.flatten(1).sum(1) if strange.dim() > 1 else strange.long()
        order = counts.argsort(descending=True)
        if int(counts[order[0]]) == int(counts[order[-1]]):
            return  # means over as many targets are equal, ignored or not
        images = torch.stack((order[0], order[-1]))[[0, 1, 1, 0]]  # pairs of different ones, then of equal ones
        values = targets[strange].unique()
        try:
            outputs = random_outputs((len(images), *self._shape), self._like.device, self._like.dtype)
            wrong = len(values) == 1 and difference_from_mean(self._loss, outputs, targets[images].to(outputs.device))
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            return
        self._ignored = int(values[0]) if wrong else None
        self._takes_all = not wrong
