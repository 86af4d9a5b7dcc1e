"""The strategy ``checkpoint``: backpropagation that recomputes as little as the memory budget allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Shortfall
from snugfit._core.profile import Profile
from snugfit._core.record import Record
from snugfit._core.workload import Workload
from snugfit._training.network import Forward
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit.memory.autocast import autocast_for_recomputation
from snugfit.profiling import Probe, unit_stats
from snugfit.profiling.measuring import FIRST_GROWTH
from snugfit.strategies.checkpoint.candidates import find_candidates, probe_name, schedule_of_probe, schedule_probes
from snugfit.strategies.checkpoint.schedule import Schedule
from snugfit.strategies.checkpoint.search import MeasurementFilter, fastest_schedule
from snugfit.strategies.full_network import (
    MakeTrainer,
    by_own_loss,
    fit_network,
    network_cost,
    network_probe,
    network_shortfall,
)
from snugfit.strategies.micro_batch import MicroBatching, hold_modes


@dataclass(frozen=True)
class Checkpoint(MicroBatching):
    """Activation checkpointing by an optimal schedule over units, with gradient accumulation.

    :meth:`propose` fills in ``recomputation``: which units run again, as a ``Schedule`` prints.
    """

    name: ClassVar[str] = "checkpoint"
    exact: ClassVar[bool] = True

    recomputation: str = ""

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why it cannot train this model: a recomputed layer must compute the same twice."""
        return chain.bypassed_hooks(recomputed=True)

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """A step by each candidate schedule, with gradients applied at once and with gradients held.

        They are lazy: a probe runs only if it may fit and be faster than the measured ones that fit.
        """
        candidates = find_candidates(chain, unit_stats(chain), workload)
        probes: dict[tuple[int, bool], Probe] = {}
        for index, candidate in enumerate(candidates):
            make = _trainer_factory(candidate.schedule)
            for hold in hold_modes(self.accumulate):
                probes[index, hold] = network_probe(candidate.probe, chain, workload, hardware.device, make, hold=hold)
        left = FIRST_GROWTH + 2 * probes[0, False].growth_bytes  # at two batch sizes
        judge = MeasurementFilter(candidates, workload, self.accumulate, left)
        return [
            replace(probe, needed=partial(judge.is_worth_measuring, candidates[index], hold))
            for (index, hold), probe in probes.items()
        ]

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Checkpoint]:
        """The fastest measured schedule, at the largest batch or micro-batch that fits."""
        probes = schedule_probes(profile.floors)
        found = fastest_schedule(probes, workload, profile, budget, accumulate=self.accumulate)
        if found is not None:
            probe, micro = found
            recomputation = schedule_of_probe(probe, len(profile.units))
            yield replace(self, recomputation=str(recomputation), **asdict(micro))

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured line of its schedule."""
        return network_cost(profile, probe_name(Schedule.parse(self.recomputation)), workload, self)

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and the smallest sufficient memory budget."""
        floor = min(profile.floors[name] for name in profile.floors if schedule_probes([name]))
        return network_shortfall(profile, floor, budget)

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
        return fit_network(self, chain, data, run, _trainer_factory(Schedule.parse(self.recomputation)))


def _trainer_factory(schedule: Schedule) -> MakeTrainer:
    """Factory of trainers by the network's own loss, with recomputation by a schedule."""
    return by_own_loss(lambda chain: recomputing_forward(chain, schedule))


@contextmanager
def _frozen_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let BatchNorm normalise by its batch without updating its buffers: the first forward pass has updated them.

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
    """The contexts of the first forward pass and of the recomputation."""
    return nullcontext(), _recomputing(modules, autocast_for_recomputation())


@contextmanager
def _recomputing(modules: Sequence[nn.Module], precision: AbstractContextManager[object]) -> Iterator[None]:
    with precision, _frozen_statistics(modules):
        yield


def recomputing_forward(chain: Chain, schedule: Schedule) -> Forward:
    """The forward pass over a chain, from images (batch, *input_shape), with recomputation by a schedule of its units.

    A stretch that is recomputed is a checkpoint of torch's; stretches within it are nested checkpoints. Tensors that
    the backward pass has used are freed at once, as are gradients that it has passed on.
    """
    modules = [unit.module for unit in chain.all_units]
    if not schedule.recomputes:
        return chain.forward

    def run(stretch: Schedule, images: Tensor) -> Tensor:
        for part in stretch.parts:
            if isinstance(part, Schedule):
                inside = partial(_contexts, [modules[unit] for unit in part.units])
                images = checkpoint(run, part, images, use_reentrant=False, context_fn=inside)
            else:
                images = modules[part](images)
        return images

    return partial(run, schedule)
