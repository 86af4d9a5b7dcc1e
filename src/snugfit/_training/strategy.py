"""What a strategy is: a frozen dataclass whose instance is its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Shortfall
from snugfit._core.profile import Profile
from snugfit._core.record import Record
from snugfit._core.workload import Workload
from snugfit._training.run import Run
from snugfit._training.split import TrainingData
from snugfit.profiling import Probe


class Strategy(Protocol):
    """A way of training under a budget.

    Attributes:
        name: name in the registry.
        exact: whether its gradients are those of plain backpropagation.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Every reason why it cannot serve this model, at once; empty when it can.

        Raises:
            ModelError: the model lacks what this strategy works on.
        """

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """What must be measured before it can propose anything."""

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Strategy]:
        """Filled-in instances that fit the budget, best first."""

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and which budget would be enough."""

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Predicted cost of this instance; pure."""

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
