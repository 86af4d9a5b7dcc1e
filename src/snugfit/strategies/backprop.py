"""Plain backpropagation at the largest batch, or micro-batch, that fits: the baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from snugfit.chain import Chain
from snugfit.core.budget import Budget
from snugfit.core.cost import Cost
from snugfit.core.hardware import Hardware
from snugfit.core.profile import Profile
from snugfit.core.record import Record
from snugfit.core.workload import Workload
from snugfit.profiling import Probe
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


def _forward(chain: Chain) -> Forward:
    return chain.forward


@dataclass(frozen=True)
class Backprop:
    """Backpropagation through the whole network.

    Where the effective batch fits, every gradient is applied and freed in the backward pass. Otherwise micro-batches
    are accumulated to it; where even that does not fit, since accumulation holds all gradients, the effective batch is
    lowered to what does, and the plan says so.

    Attributes:
        micro_batch: images in memory at once.
        micro_batches: micro-batches accumulated to one step.
        accumulate: whether to accumulate to the effective batch; off is the baseline of NeuroFlux's evaluation, one
            step per batch that fits.
    """

    name: ClassVar[str] = "backprop"
    exact: ClassVar[bool] = True

    micro_batch: int = 0
    micro_batches: int = 1
    accumulate: bool = True

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why it cannot serve this model: none."""
        return []

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """The whole network's step, with gradients applied at once and with gradients held."""
        return whole_probes("network", chain, workload, hardware.device, _forward, accumulate=self.accumulate)

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Backprop]:
        """The whole batch, else accumulation to it, else the largest batch that fits without accumulation."""
        settings = batch_settings(workload, profile, budget, "network", accumulate=self.accumulate)
        if settings is not None:
            yield replace(self, **settings)

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured lines."""
        return whole_cost(profile, "network", workload, self.micro_batch, self.micro_batches)

    def shortfall(
        self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget
    ) -> tuple[tuple[str, ...], int]:
        """Why nothing was proposed, and the smallest memory budget that would do, in bytes."""
        return whole_reasons(profile, "network", budget)

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
        return fit_whole(
            chain, data, run,
            strategy=self.name, settings=asdict(self), forward=_forward, micro_batches=self.micro_batches,
        )  # fmt: skip
