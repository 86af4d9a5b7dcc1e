"""The strategy ``checkpoint``: backpropagation that recomputes as little as the memory budget allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import ClassVar

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.cost import Cost, Shortfall
from snugfit._core.hardware import Hardware
from snugfit._core.profile import Profile
from snugfit._core.record import Record
from snugfit._core.workload import Workload
from snugfit._training.run import Run
from snugfit._training.split import TrainingData
from snugfit.profiling import Probe, unit_facts
from snugfit.profiling.measuring import FIRST_GROWTH
from snugfit.strategies.checkpoint.candidates import key_of, keys_in, schedule_of, ways_of
from snugfit.strategies.checkpoint.forward import recomputing_forward
from snugfit.strategies.checkpoint.schedule import Schedule
from snugfit.strategies.checkpoint.search import Wanted, fastest
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
    """Activation checkpointing by an optimal schedule over units, with accumulation: the peer that users know.

    Attributes:
        recomputation: which units run again, as a ``Schedule`` prints; filled in by :meth:`propose`.
    """

    name: ClassVar[str] = "checkpoint"
    exact: ClassVar[bool] = True

    recomputation: str = ""

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why it cannot serve this model: what is recomputed must compute the same twice."""
        return chain.bypassed_hooks(recomputed=True)

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """A step by each schedule that is worth considering, with gradients applied at once and with gradients held.

        They are lazy: one is measured only where it may fit and be faster than what was found to.
        """
        ways = ways_of(chain, unit_facts(chain), workload)
        probes = {
            (way, hold): network_probe(
                way.key, chain, workload, hardware.device, trainer_by(way.schedule), hold=hold
            )
            for way in ways
            for hold in hold_modes(self.accumulate)
        }  # fmt: skip
        left = FIRST_GROWTH + 2 * probes[ways[0], False].growth_bytes  # at two batch sizes
        wanted = Wanted(ways, workload, self.accumulate, left)
        return [replace(probe, needed=partial(wanted.needs, *each)) for each, probe in probes.items()]

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Checkpoint]:
        """The fastest schedule of those that were measured, at the largest batch, or micro-batch, that fits."""
        found = fastest(keys_in(profile.floors), workload, profile, budget, accumulate=self.accumulate)
        if found is not None:
            recomputation = schedule_of(found.key, len(profile.units))
            yield replace(self, recomputation=str(recomputation), **asdict(found.micro))

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured line of its schedule."""
        key = key_of(Schedule.parse(self.recomputation))
        return network_cost(profile, key, workload, self)

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and the smallest memory budget that would do."""
        floors = {name: profile.floors[name] for name in profile.floors if keys_in([name])}
        return network_shortfall(profile, min(floors, key=lambda name: floors[name]), budget)

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
        return fit_network(self, chain, data, run, trainer_by(Schedule.parse(self.recomputation)))


def trainer_by(schedule: Schedule) -> MakeTrainer:
    """The network's own loss, recomputing by a schedule."""
    return by_own_loss(lambda chain: recomputing_forward(chain, schedule))
