"""Recomputed running statistics of BatchNorm: exactly those of all inputs together, not an average over batches.

Every batch's mean and sum of squared differences are combined pairwise in float64 (Chan, Golub and LeVeque 1979). An
average of the batches' variances would ignore the differences of their means, which matters for small batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

SHARE = 0.06
"""Share of training images for statistics; without a backward pass they take 2 to 3 % of an epoch."""
FEWEST = 256
"""Smallest number of images: with 64, a fine-tuned MobileNetV2 has 3 points less accuracy (docs/design.md)."""
MOST = 4096
"""Largest number of images; more change nothing."""


def images_for(count: int) -> int:
    """Number of images for statistics, of ``count`` training images."""
    return min(max(int(SHARE * count), FEWEST), MOST, count)


@torch.no_grad()
def recompute_statistics(
    norms: Sequence[nn.Module],
    forward: Callable[[Tensor], object],
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    pixels: Mapping[nn.Module, int] | None = None,
) -> None:
    """Replace running means and variances by those of the norms' inputs over batches; without norms nothing is read.

    Meanwhile norms normalise by each batch, and all other layers keep their mode. Variances are unbiased, as in torch.
    A norm that no batch reaches keeps its statistics, and all keep their count of batches.

    Args:
        norms: with running statistics; they end in evaluation mode.
        forward: runs a batch (B, ...) through them.
        batches: pairs of inputs (B, ...) and labels, as in training.
        device: where to compute.
        pixels: for norms that are not called as modules, values per channel and input that they read.
    """
    if not norms:
        return
    by_hand = pixels or {}
    pools = {norm: _Pool(cast(_BatchNorm, norm)) for norm in norms}
    with _watched(pools, by_hand):
        for inputs, _ in batches:
            count = len(inputs)
            forward(inputs.to(device))
            for norm in pools.keys() & by_hand.keys():
                pools[norm].add(count * by_hand[norm])
    for pool in pools.values():
        pool.keep()


class _Pool:
    """The inputs of a norm so far: values per channel, their mean and their sum of squared differences, (C,)."""

    def __init__(self, norm: _BatchNorm) -> None:
        assert norm.running_mean is not None and norm.running_var is not None
        self.norm, self.mean, self.variance = norm, norm.running_mean, norm.running_var
        self.count = 0
        self.centre = torch.zeros_like(self.mean, dtype=torch.float64)
        self.squares = torch.zeros_like(self.centre)

    def add(self, count: int) -> None:
        """Add a batch with this number of values per channel, whose statistics are now the running ones."""
        apart, total = self.mean.double() - self.centre, self.count + count
        self.squares += self.variance.double() * (count - 1) + apart.square() * (self.count * count / total)
        self.centre += apart * (count / total)
        self.count = total

    def keep(self) -> None:
        """Set the running statistics to those of all batches."""
        if self.count > 1:
            self.mean.copy_(self.centre)
            self.variance.copy_(self.squares / (self.count - 1))


@contextmanager
def _watched(pools: Mapping[nn.Module, _Pool], by_hand: Mapping[nn.Module, int]) -> Iterator[None]:
    """Set every norm's running statistics to its last batch's alone, and add them to the pools after each call."""

    def called(norm: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        pools[norm].add(output.numel() // pools[norm].norm.num_features)  # as many as it was given, by whatever name

    before = {norm: (pool.norm.momentum, _counted(pool.norm)) for norm, pool in pools.items()}
    handles = [norm.register_forward_hook(called, prepend=True) for norm in pools if norm not in by_hand]
    try:
        for norm, pool in pools.items():
            norm.train()
            pool.norm.momentum = 1.0
        yield
    finally:
        for handle in handles:
            handle.remove()
        for norm, pool in pools.items():
            pool.norm.momentum, counted = before[norm]
            if counted is not None and pool.norm.num_batches_tracked is not None:
                pool.norm.num_batches_tracked.copy_(counted)
            norm.eval()


def _counted(norm: _BatchNorm) -> Tensor | None:
    return None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
