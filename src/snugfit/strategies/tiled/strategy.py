"""The strategy ``tiled``: exact training in tiles (Rama and Gerstlauer, UT-CERC-24-02), on one device or several."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware, read_cluster
from snugfit._core.plan import Cost, Shortfall
from snugfit._core.profile import ProbeLine, Profile
from snugfit._core.record import Record
from snugfit._core.workload import Workload
from snugfit._training.events import Notice
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit.errors import ModelError
from snugfit.memory.scratch import MappedScratch
from snugfit.profiling import Probe
from snugfit.strategies.full_network import (
    MakeTrainer,
    batch_settings,
    fit_network,
    network_cost,
    network_probe,
    network_shortfall,
    reasons_against_training,
)
from snugfit.strategies.memory_estimates import available_headroom
from snugfit.strategies.micro_batch import hold_modes, probe_of_line
from snugfit.strategies.tiled.candidates import (
    PREFIX,
    TiledSettings,
    chosen_plan,
    find_plans,
    probe_name,
    settings_of_probe,
    typical_cluster,
)
from snugfit.strategies.tiled.network_overhead import NetworkOverhead
from snugfit.strategies.tiled.runner import GatewayTrainer, fit_over_processes
from snugfit.strategies.tiled_training import OneDeviceTrainer
from snugfit.tiling.plan import TilePlan
from snugfit.tiling.transport import DryRunTransport, NullChannel, world_size


@dataclass(frozen=True)
class Tiled(TiledSettings):
    """Backpropagation whose leading layers run in tiles; the result is exact."""

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why it cannot train this model."""
        if chain.undivided or chain.inputs:
            return chain.reasons_against_units()
        reasons = chain.reasons_against_units() + reasons_against_training(chain)
        if self.scratch == "on" and hardware.device != "cpu":
            reasons.append("--scratch on stores feature maps in files, which requires --device cpu")
        try:
            self._plans(chain)
        except ModelError as error:
            reasons.append(str(error).rstrip("."))
        return reasons

    def _plans(self, chain: Chain) -> dict[str, TilePlan]:
        """The plans that are worth measuring, by names of probes."""
        if self.cluster is not None:
            return find_plans(chain, self, read_cluster(self.cluster, self.processes))
        return find_plans(chain, self, typical_cluster(self.processes) if self.processes > 1 else None)

    def _make_trainer(self, plan: TilePlan) -> MakeTrainer:
        """Factory of trainers of the gateway's share, with simulated other processes."""
        if self.processes > 1:
            transport = DryRunTransport(0, self.processes)
            return partial(GatewayTrainer, plan=plan, transport=transport, channel=NullChannel())
        return _on_one_device(plan, MappedScratch(Path(tempfile.gettempdir())))

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """A step by each plan; a slower one is measured only if none before it fits."""
        limit = workload.effective_batch
        found: list[Probe] = []
        faster: list[str] = []
        for key, plan in self._plans(chain).items():
            if plan.scratch and hardware.device != "cpu":
                continue
            for hold in hold_modes(self.accumulate):
                needed = partial(_is_needed, tuple(faster), key if hold else None, limit)
                make = self._make_trainer(plan)
                probe = network_probe(key, chain, workload, hardware.device, make, hold=hold, heap="steps")
                # mapped pages grow in the first step
                found.append(replace(probe, needed=needed, warm_up=plan.scratch > 0))
            faster.append(key)
        return found

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Tiled]:
        """Every measured plan that fits, at the full batch or accumulated to it."""
        measured = {probe_of_line(key) for key in profile.lines if key.startswith(PREFIX)}
        for key in (each for each in profile.floors if each in measured):
            micro = batch_settings(workload, profile, budget, key, accumulate=self.accumulate)
            if micro is not None:
                yield replace(self, **settings_of_probe(key), **asdict(micro))

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured lines and, on a measured cluster, the overhead of its network."""
        cost = network_cost(profile, probe_name(chosen_plan(self), self.network), workload, self)
        size = self.scratch_bytes * self.micro_batch
        phases = tuple(replace(phase, storage_bytes=size) for phase in cost.phases)
        cost = replace(cost, storage_bytes=size, phases=phases)
        if not self.network:
            return cost
        tracks = any(unit.tracks for unit in profile.units)
        return NetworkOverhead.parse(self.network).add_to(cost, workload, self, tracks=tracks)

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and the smallest sufficient memory budget."""
        floor = min(floor for key, floor in profile.floors.items() if key.startswith(PREFIX))
        return network_shortfall(profile, floor, budget, workload)

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train; the other processes, if any, must be serving."""
        if world_size() != self.processes:
            return self._for_present_processes(chain, run).fit(chain, data, run)
        plan = chosen_plan(self)
        if self.processes > 1:
            return fit_over_processes(self, chain, data, run, plan)
        scratch = MappedScratch(run.cache_dir, run.budget.storage_bytes, run.count_storage)
        return fit_network(self, chain, data, run, _on_one_device(plan, scratch))

    def _for_present_processes(self, chain: Chain, run: Run) -> Tiled:
        """The same settings for the present number of processes, since a resumed run may have lost some."""
        unset: dict[str, Any] = dict.fromkeys(("tiles", "forward_groups", "backward_groups", "scratch"), "auto")
        unset |= {"cluster": None, "tile_sizes": "equal", "scratch_bytes": 0, "shares": "", "network": ""}
        free = replace(self, **unset, processes=world_size(), replicas=1)
        changed = replace(free, **settings_of_probe(next(iter(find_plans(chain, free)))))
        tiles = f"{self.tiles} tiles become {changed.tiles}"
        run.emit(Notice(f"{self.processes} processes are {changed.processes} now: {tiles}"))
        return changed


def _on_one_device(plan: TilePlan, scratch: MappedScratch) -> MakeTrainer:
    """Factory of trainers of a plan, which store whole feature maps in ``scratch`` if the plan does."""
    return partial(OneDeviceTrainer, grid=plan.grid, groups=plan.forward, scratch=scratch if plan.scratch else None)


def _is_needed(
    faster: tuple[str, ...], plain: str | None, limit: int, tried: Mapping[str, ProbeLine | None], available: float
) -> bool:
    """Whether no faster plan fits the full batch, and one sample fits without held gradients, which take more."""
    lines, headroom = map(tried.get, faster), available_headroom(available)
    if any(line is not None and line.largest_batch(headroom, limit) >= limit for line in lines):
        return False
    return plain is None or plain not in tried or tried[plain] is not None
