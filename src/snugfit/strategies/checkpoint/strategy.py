"""The strategy ``checkpoint``: backpropagation that recomputes as little as the memory budget allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Shortfall
from snugfit._core.profile import HeapUse, Profile
from snugfit._core.record import Record
from snugfit._core.workload import Workload
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit.memory.device import has_own_memory
from snugfit.memory.host_pages import HostPages, keeps_pages_on_host, multiplications_per_byte
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
    reasons_against_training,
)
from snugfit.strategies.micro_batch import MicroBatching, hold_modes
from snugfit.strategies.recomputation.module_costs import reasons_against_modules
from snugfit.strategies.recomputation.paging import DiskPages, Pages, Paging, recomputing_forward
from snugfit.strategies.recomputation.schedule import AnySchedule, Schedule, parse_schedule
from snugfit.strategies.recomputation.unit_costs import TYPICAL_SPEED


@dataclass(frozen=True)
class Checkpoint(MicroBatching):
    """Activation checkpointing by an optimal schedule over units, with gradient accumulation.

    :meth:`propose` fills in ``recomputation``: which units run again or page, or which modules of a network that cannot
    be divided run again, as their schedule prints; ``paged_bytes``: most bytes of an image elsewhere. Probes page to
    ``paging_folder``, a run to its cache folder, and both to host memory on a GPU, where there is no folder.
    """

    name: ClassVar[str] = "checkpoint"
    exact: ClassVar[bool] = True

    recomputation: str = ""
    paged_bytes: int = 0
    paging_folder: str = ""

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why it cannot train this model: a recomputed layer must compute the same twice."""
        if frozen := reasons_against_training(chain):
            return frozen
        if chain.undivided:
            reasons = reasons_against_modules(chain) + reasons_against_rounding(workload, chain)
            paged = [f"--activations paged {reason}" for reason in chain.reasons_against_units()]
            return reasons + paged if workload.activations == "paged" else reasons
        reasons = chain.reasons_against_units(recomputed=True)
        if workload.activations == "paged" and hardware.device != "cpu" and not keeps_pages_on_host(hardware.device):
            reasons.append("--activations paged moves activations to host memory, which this GPU shares")
        return reasons

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """A step by each candidate schedule, with gradients applied at once and with gradients held.

        They are lazy: a probe runs only if it may fit and be faster than the measured ones that fit.
        """
        chain = in_weight_dtype(chain, workload)
        stats = unit_stats(chain)
        paging = self._paging(hardware.device) if workload.activations == "paged" else None
        candidates = find_candidates(chain, stats, workload, paging)
        make_pages = partial(_make_pages, hardware.device, Path(self.paging_folder))
        probes: dict[tuple[int, bool], Probe] = {}
        for index, candidate in enumerate(candidates):
            make = _trainer_factory(candidate.schedule, make_pages)
            name = candidate.probe
            heap = _heap_use(candidate.schedule)
            for hold in hold_modes(self.accumulate):
                probe = network_probe(name, chain, workload, hardware.device, make, hold=hold, heap=heap)
                probes[index, hold] = probe
        left = FIRST_GROWTH + 2 * probes[0, False].growth_bytes  # at two batch sizes
        images, norms = workload.train_count * workload.epochs, any(unit.tracks for unit in stats)
        judge = MeasurementFilter(candidates, workload, self.accumulate, left, images, norms)
        return [
            replace(probe, needed=partial(judge.is_worth_measuring, candidates[index], hold))
            for (index, hold), probe in probes.items()
        ]

    def _paging(self, device: str) -> Paging:
        """Where it may page to, with its measured speed."""
        make, folder = partial(_make_pages, device, Path(self.paging_folder)), Path(self.paging_folder)
        if has_own_memory(device):
            return Paging(TYPICAL_SPEED / multiplications_per_byte(torch.device(device)), make)
        return Paging(disk_speed(folder), make)

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Checkpoint]:
        """The fastest measured schedule, at the largest batch or micro-batch that fits.

        If it pages more than the budget has room for, the fastest one that pages nothing follows.
        """
        probes = schedule_probes(profile.floors)
        norms = any(unit.tracks for unit in profile.units)
        on_host = has_own_memory(hardware.device)
        room = budget.host_memory_bytes if on_host else budget.storage_bytes
        resident = [probe for probe in probes if not schedule_of_probe(probe, len(profile.units))[1]]
        for offered in (probes, resident):
            found = fastest_schedule(offered, workload, profile, budget, accumulate=self.accumulate, norms=norms)
            if found is None:
                return
            probe, micro = found
            schedule, paged = schedule_of_probe(probe, len(profile.units))
            proposal = replace(self, recomputation=str(schedule), paged_bytes=paged, **asdict(micro))
            yield replace(proposal, paging_folder="") if on_host else proposal
            if room is None or proposal.paged_at_once(on_host=on_host) <= room:
                return

    def paged_at_once(self, *, on_host: bool) -> int:
        """Most bytes that are paged; in host memory twice as many, since pinned blocks have powers of two as sizes."""
        return self.paged_bytes * self.micro_batch * (2 if on_host else 1)

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured line of its schedule."""
        probe = probe_name(parse_schedule(self.recomputation), self.paged_bytes)
        cost = network_cost(profile, probe, workload, self)
        on_host = has_own_memory(hardware.device)
        size = self.paged_at_once(on_host=on_host)
        if on_host:
            return replace(cost, host_bytes=size)
        phases = tuple(replace(phase, storage_bytes=size) for phase in cost.phases)
        return replace(cost, storage_bytes=size, phases=phases)

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and the smallest sufficient memory budget."""
        floor = min(profile.floors[name] for name in profile.floors if schedule_probes([name]))
        return network_shortfall(profile, floor, budget, workload)

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
        limits = run.budget.storage_bytes, run.count_storage
        make_pages = partial(_make_pages, str(run.device), run.cache_dir, *limits)
        return fit_network(self, chain, data, run, _trainer_factory(parse_schedule(self.recomputation), make_pages))


def _make_pages(device: str, folder: Path, *limits: Any) -> Pages:
    """Pages of a GPU in host memory, or else in a file in a folder, within its limits."""
    return HostPages() if has_own_memory(device) else DiskPages(PageFile(folder, *limits))


def _trainer_factory(schedule: AnySchedule, make_pages: Callable[[], Pages]) -> MakeTrainer:
    """Factory of trainers by the network's own loss, with recomputation by a schedule; each has pages of its own."""
    return by_own_loss(
        lambda chain: recomputing_forward([unit.module for unit in chain.all_units], schedule, make_pages())
    )


def _heap_use(schedule: AnySchedule) -> HeapUse:
    """How a schedule's steps use the heap; modules that run again, unlike units, have no graphs of their own."""
    if schedule.paged:
        return "nothing"
    return "recomputed" if isinstance(schedule, Schedule) and schedule.recomputes else "layers"
