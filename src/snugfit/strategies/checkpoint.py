"""Backpropagation that keeps only the maps between segments of units and recomputes the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from snugfit.chain import Chain
from snugfit.core.profile import UnitFacts
from snugfit.strategies.whole import MakeTrainer, WholeNetwork, by_own_loss
from snugfit.training.network import Forward


def segment(units: Sequence[UnitFacts]) -> tuple[tuple[int, ...], ...]:
    """Split units into segments so that the maps kept between them plus the largest segment's saved bytes are fewest.

    Exact over all contiguous splits, and never worse than a square-root split (Chen et al. 2016, section 4.1).

    Args:
        units: facts per unit, in chain order.

    Returns:
        Indices of the units of each segment.
    """
    saved = [unit.saved_bytes for unit in units]
    limits = sorted({sum(saved[i:j]) for i in range(len(units)) for j in range(i + 1, len(units) + 1)})
    best_cost, best_starts = float("inf"), [0]
    for limit in limits:
        kept, starts = _cheapest_cuts(units, limit)
        if kept + limit < best_cost:
            best_cost, best_starts = kept + limit, starts
    ends = [*best_starts[1:], len(units)]
    return tuple(tuple(range(start, end)) for start, end in zip(best_starts, ends, strict=True))


def _cheapest_cuts(units: Sequence[UnitFacts], limit: int) -> tuple[float, list[int]]:
    """Fewest bytes kept between segments none of which saves more than ``limit``; and where the segments start."""
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(units) + 1):
        options = []
        saved = 0
        for start in range(end - 1, -1, -1):
            saved += units[start].saved_bytes
            if saved > limit:
                break
            kept, starts = best[start]
            boundary = units[start - 1].output_bytes if start else 0
            options.append((kept + boundary, [*starts, start]))
        best.append(min(options, default=(float("inf"), [])))
    return best[-1]


@contextmanager
def _statistics_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """BatchNorm normalises by its batch and leaves its buffers as they are: the first forward pass has updated them.

    The buffers are still passed, with momentum 0, since recomputation must save the same tensors as the first pass.
    """
    norms = [m for module in modules for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    settings = [(norm.momentum, norm._buffers["num_batches_tracked"]) for norm in norms]
    for norm in norms:
        norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, settings, strict=True):
            norm.momentum, norm._buffers["num_batches_tracked"] = momentum, tracked


def _contexts(modules: Sequence[nn.Module]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_kept(modules)


def recomputing_forward(chain: Chain, segments: Sequence[Sequence[int]]) -> Forward:
    """Forward pass over the chain that recomputes each segment but the last in the backward pass.

    Args:
        chain: the chain.
        segments: indices into ``chain.all_units``.
    """
    stretches = [[chain.all_units[index].module for index in indices] for indices in segments]

    def run(modules: Sequence[nn.Module], images: Tensor) -> Tensor:
        for module in modules:
            images = module(images)
        return images

    def forward(images: Tensor) -> Tensor:
        for modules in stretches[:-1]:
            images = checkpoint(run, modules, images, use_reentrant=False, context_fn=partial(_contexts, modules))
        return run(stretches[-1], images)

    return forward


@dataclass(frozen=True)
class Checkpoint(WholeNetwork):
    """Activation checkpointing over units, with accumulation: the peer that users know."""

    name: ClassVar[str] = "checkpoint"
    probe: ClassVar[str] = "checkpoint"

    def make_trainer(self, units: Sequence[UnitFacts]) -> MakeTrainer:
        """The network's own loss, keeping no more than the maps between the best segments of these units."""
        segments = segment(units)
        return by_own_loss(lambda chain: recomputing_forward(chain, segments))
