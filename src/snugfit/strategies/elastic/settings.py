"""The settings of ``elastic``, and what follows from them alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit._core.budget import Budget
from snugfit._core.literals import ImportanceMetric
from snugfit._core.profile import Profile
from snugfit._core.workload import Workload
from snugfit.selection.network import Mask, Network
from snugfit.strategies.elastic.budgets import Sizes
from snugfit.strategies.elastic.config import ElasticScheme as Scheme
from snugfit.strategies.elastic.schemes import scheme_mask
from snugfit.strategies.micro_batch import MicroBatching


@dataclass(frozen=True)
class ElasticSettings(MicroBatching):
    """Settings of ``elastic``.

    Attributes:
        scheme: ``elastic`` selects tensors anew every ``interval`` epochs; ``full``, ``head``, ``bn+bias`` and
            ``prunetrain`` are the baselines of section 8.
        importance: what tensors are ranked by.
        interval: epochs between two selections.
        importance_batch: images that importance is told from.
        lean: whether frozen tensors keep no activations.
        lasso: share of the group lasso in the loss of ``prunetrain`` at the start.
        time_ratio: rho, step time over that of full training; filled in by ``propose``.
        budget_bytes: memory budget, which selections keep to; filled in by ``propose``.
        chunk: images at once in the pass that tells importance; filled in by ``propose``.
    """

    name: ClassVar[str] = "elastic"
    exact: ClassVar[bool] = False

    scheme: Scheme = "elastic"
    importance: ImportanceMetric = "contribution"
    interval: int = 3
    importance_batch: int = 4
    lean: bool = True
    lasso: float = 0.2
    time_ratio: float | None = None
    budget_bytes: int | None = None
    chunk: int = 0

    @property
    def selects(self) -> bool:
        """Whether tensors are selected at run time."""
        return self.scheme == "elastic"

    @property
    def prunes(self) -> bool:
        """Whether channels are removed at run time."""
        return self.scheme == "prunetrain"

    @property
    def budget(self) -> Budget:
        """What its selections keep to."""
        return Budget(self.budget_bytes, None, self.time_ratio)

    def sizes(self, workload: Workload, profile: Profile) -> Sizes:
        """What this instance needs, as a function of the selection."""
        return Sizes(profile, workload, MicroBatching(self.micro_batch, self.micro_batches))

    def fixed(self, network: Network) -> Mask:
        """The selection of a scheme that never changes it."""
        return scheme_mask(self.scheme, network)

    def spans(self, epochs: int) -> list[range]:
        """Epochs of each interval."""
        length = self.interval if self.selects or self.prunes else epochs
        return [range(start, min(start + length, epochs)) for start in range(0, epochs, length)]
