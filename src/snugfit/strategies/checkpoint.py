"""Backpropagation that keeps only the maps between segments of units and recomputes the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from snugfit.chain import Chain
from snugfit.core.budget import Budget
from snugfit.core.cost import Cost
from snugfit.core.hardware import Hardware
from snugfit.core.profile import Profile, UnitFacts
from snugfit.core.record import Record
from snugfit.core.workload import Workload
from snugfit.profiling import Probe, unit_facts
from snugfit.strategies.whole import (
    batch_settings,
    fit_whole,
    whole_cost,
    whole_probes,
    whole_reasons,
)
from snugfit.training.network import Forward
from snugfit.training.run import Run
from snugfit.training.split import TrainingData


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
class Checkpoint:
    """Activation checkpointing over units, with accumulation: the peer that users know.

    Attributes:
        micro_batch: images in memory at once.
        micro_batches: micro-batches accumulated to one step.
        accumulate: whether to accumulate to the effective batch.
    """

    name: ClassVar[str] = "checkpoint"
    exact: ClassVar[bool] = True

    micro_batch: int = 0
    micro_batches: int = 1
    accumulate: bool = True

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why it cannot serve this model: none."""
        return []

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """The recomputing step, with gradients applied at once and with gradients held."""
        segments = segment(unit_facts(chain))

        def forward(clone: Chain) -> Forward:
            return recomputing_forward(clone, segments)

        return whole_probes("checkpoint", chain, workload, hardware.device, forward, accumulate=self.accumulate)

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Checkpoint]:
        """The whole batch, else accumulation to it, else the largest batch that fits without accumulation."""
        settings = batch_settings(workload, profile, budget, "checkpoint", accumulate=self.accumulate)
        if settings is not None:
            yield replace(self, **settings)

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured lines."""
        return whole_cost(profile, "checkpoint", workload, self.micro_batch, self.micro_batches)

    def shortfall(
        self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget
    ) -> tuple[tuple[str, ...], int]:
        """Why nothing was proposed, and the smallest memory budget that would do, in bytes."""
        return whole_reasons(profile, "checkpoint", budget)

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
        segments = segment(run.profile.units)
        return fit_whole(
            chain, data, run,
            strategy=self.name, settings=asdict(self), micro_batches=self.micro_batches,
            forward=lambda chain: recomputing_forward(chain, segments),
        )  # fmt: skip
