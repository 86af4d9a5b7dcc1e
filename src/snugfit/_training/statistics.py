"""BatchNorm's running statistics taken anew: exactly those of all inputs together, not an average over batches.

Every batch's mean and sum of squared differences are combined pairwise in float64 (Chan, Golub and LeVeque 1979). An
average of the batches' variances would leave out how much their means differ, which matters in small batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def retake(
    norms: Sequence[nn.Module],
    forward: Callable[[Tensor], object],
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    pixels: Mapping[nn.Module, int] | None = None,
) -> None:
    """Replace running means and variances by those of what norms read while batches pass; read none without norms.

    Norms normalise by each batch meanwhile, and all other layers stay in the mode that they are in. Variances are
    unbiased, as torch's are. A norm that no batch reaches keeps its statistics, and all keep their count of batches.

    Args:
        norms: with running statistics; afterwards they are in evaluation mode.
        forward: runs a batch (B, ...) through them.
        batches: pairs of inputs and labels, as training sees them.
        device: where to compute.
        pixels: of norms that are not called as modules, values per channel that they read of each input.
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
    """What a norm has read so far: values per channel, their mean and their sum of squared differences, (C,)."""

    def __init__(self, norm: _BatchNorm) -> None:
        assert norm.running_mean is not None and norm.running_var is not None
        self.norm, self.mean, self.variance = norm, norm.running_mean, norm.running_var
        self.count = 0
        self.centre = torch.zeros_like(self.mean, dtype=torch.float64)
        self.squares = torch.zeros_like(self.centre)

    def add(self, count: int) -> None:
        """Take in a batch, whose statistics the running ones now are, of so many values per channel."""
        apart, total = self.mean.double() - self.centre, self.count + count
        self.squares += self.variance.double() * (count - 1) + apart.square() * (self.count * count / total)
        self.centre += apart * (count / total)
        self.count = total

    def keep(self) -> None:
        """Make the statistics of all batches the running ones."""
        if self.count > 1:
            self.mean.copy_(self.centre)
            self.variance.copy_(self.squares / (self.count - 1))


@contextmanager
def _watched(pools: Mapping[nn.Module, _Pool], by_hand: Mapping[nn.Module, int]) -> Iterator[None]:
    """Let every norm's running statistics be those of its last batch alone, and pools take them in after each call."""

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
