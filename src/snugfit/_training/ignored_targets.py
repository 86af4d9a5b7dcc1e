"""Targets that a loss leaves out of its mean, which means of micro-batches would weight differently."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from snugfit._training.losses import Loss, difference_from_mean, random_outputs

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
        strange = (targets < 0) | (targets >= max(self._shape[0], 2))
        images = strange.flatten(1).any(1) if strange.dim() > 1 else strange
        rows = torch.cat([images.nonzero()[:3, 0], (~images).nonzero()[:3, 0]])
        if not bool(images.any()) or (targets.dim() == 1 and bool(images.all())):
            return
        rows = rows[torch.arange(6, device=rows.device) % len(rows)]
        outputs = random_outputs((6, *self._shape), self._like.device, self._like.dtype)
        if difference_from_mean(self._loss, outputs, targets[rows].to(outputs.device)):
            self._ignored = int(targets[strange][0])
        else:
            self._takes_all = True
