"""The strategy ``checkpoint``: backpropagation that recomputes as little as the memory budget allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Shortfall
from snugfit._core.profile import Profile
from snugfit._core.record import Record
from snugfit._core.workload import Workload
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit.memory.paging import PageFile, disk_speed
from snugfit.profiling import Probe, unit_stats
from snugfit.profiling.measuring import FIRST_GROWTH
from snugfit.strategies.checkpoint.candidates import (
    MeasurementFilter,
    fastest_schedule,
    find_candidates,
    probe_name,
    schedule_of_probe,
    schedule_probes,
)
from snugfit.strategies.full_network import (
    MakeTrainer,
    by_own_loss,
    fit_network,
    in_weight_dtype,
    network_cost,
    network_probe,
    network_shortfall,
    reasons_against_rounding,
)
from snugfit.strategies.micro_batch import MicroBatching, hold_modes
from snugfit.strategies.recomputation.module_costs import reasons_against_modules
from snugfit.strategies.recomputation.paging import recomputing_forward
from snugfit.strategies.recomputation.schedule import AnySchedule, parse_schedule


@dataclass(frozen=True)
class Checkpoint(MicroBatching):
    """Activation checkpointing by an optimal schedule over units, with gradient accumulation.

    :meth:`propose` fills in ``recomputation``: which units run again or page, or which modules of a network that cannot
    be divided run again, as their schedule prints; and ``paged_bytes``: most bytes of an image on disk. Probes page to
    ``paging_folder``, a run to its cache folder.
    """

    name: ClassVar[str] = "checkpoint"
    exact: ClassVar[bool] = True

    recomputation: str = ""
    paged_bytes: int = 0
    paging_folder: str = ""

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why it cannot train this model: a recomputed layer must compute the same twice."""
        if chain.undivided:
            reasons = reasons_against_modules(chain) + reasons_against_rounding(workload, chain)
            paged = [f"--activations paged {reason}" for reason in chain.reasons_against_units()]
            return reasons + paged if workload.activations == "paged" else reasons
        reasons = chain.reasons_against_units(recomputed=True)
        if workload.activations == "paged" and hardware.device != "cpu":
            reasons.append("--activations paged keeps activations in a file, which requires --device cpu")
        return reasons

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """A step by each candidate schedule, with gradients applied at once and with gradients held.

        They are lazy: a probe runs only if it may fit and be faster than the measured ones that fit.
        """
        chain = in_weight_dtype(chain, workload)
        speed = disk_speed(Path(self.paging_folder)) if workload.activations == "paged" else None
        stats = unit_stats(chain)
        candidates = find_candidates(chain, stats, workload, speed)
        probes: dict[tuple[int, bool], Probe] = {}
        for index, candidate in enumerate(candidates):
            make = _trainer_factory(candidate.schedule, partial(PageFile, Path(self.paging_folder)))
            for hold in hold_modes(self.accumulate):
                probes[index, hold] = network_probe(candidate.probe, chain, workload, hardware.device, make, hold=hold)
        left = FIRST_GROWTH + 2 * probes[0, False].growth_bytes  # at two batch sizes
        images, norms = workload.train_count * workload.epochs, any(unit.tracks for unit in stats)
        judge = MeasurementFilter(candidates, workload, self.accumulate, left, images, norms)
        return [
            replace(probe, needed=partial(judge.is_worth_measuring, candidates[index], hold))
            for (index, hold), probe in probes.items()
        ]

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Checkpoint]:
        """The fastest measured schedule, at the largest batch or micro-batch that fits."""
        probes = schedule_probes(profile.floors)
        norms = any(unit.tracks for unit in profile.units)
        found = fastest_schedule(probes, workload, profile, budget, accumulate=self.accumulate, norms=norms)
        if found is not None:
            probe, micro = found
            schedule, paged = schedule_of_probe(probe, len(profile.units))
            yield replace(self, recomputation=str(schedule), paged_bytes=paged, **asdict(micro))

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured line of its schedule."""
        probe = probe_name(parse_schedule(self.recomputation), self.paged_bytes)
        cost = network_cost(profile, probe, workload, self)
        size = self.paged_bytes * self.micro_batch
        phases = tuple(replace(phase, storage_bytes=size) for phase in cost.phases)
        return replace(cost, storage_bytes=size, phases=phases)

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and the smallest sufficient memory budget."""
        floor = min(profile.floors[name] for name in profile.floors if schedule_probes([name]))
        return network_shortfall(profile, floor, budget, workload)

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
        make_file = partial(PageFile, run.cache_dir, run.budget.storage_bytes, run.count_storage)
        return fit_network(self, chain, data, run, _trainer_factory(parse_schedule(self.recomputation), make_file))


def _trainer_factory(schedule: AnySchedule, make_file: Callable[[], PageFile]) -> MakeTrainer:
    """Factory of trainers by the network's own loss, with recomputation by a schedule; each has a file of its own."""
    return by_own_loss(
        lambda chain: recomputing_forward([unit.module for unit in chain.all_units], schedule, make_file())
    )
