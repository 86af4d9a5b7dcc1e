"""The settings of ``elastic``, and values derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from snugfit._core.budget import Budget
from snugfit._core.profile import Profile
from snugfit._core.workload import Workload
from snugfit.selection.network import Mask, Network
from snugfit.strategies.elastic.budgets import SelectionCosts
from snugfit.strategies.elastic.config import ElasticOptions, ElasticScheme
from snugfit.strategies.micro_batch import MicroBatching


@dataclass(frozen=True)
class ElasticSettings(ElasticOptions, MicroBatching):
    """Settings of ``elastic``: its options, and values that ``propose`` sets.

    Attributes:
        time_ratio: rho, step time over that of full training.
        budget_bytes: memory budget of selections.
        chunk: images at once in the importance pass.
    """

    name: ClassVar[str] = "elastic"
    exact: ClassVar[bool] = False

    scheme: ElasticScheme = "elastic"
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
        """The budget of its selections."""
        return Budget(self.budget_bytes, None, self.time_ratio)

    def costs(self, workload: Workload, profile: Profile) -> SelectionCosts:
        """Memory and time of selections with these settings."""
        return SelectionCosts(profile, workload, MicroBatching(self.micro_batch, self.micro_batches))

    def fixed(self, network: Network) -> Mask:
        """The tensors that a baseline trains (N,), bool (ElasticTrainer section 8).

        ``full`` and ``prunetrain`` train everything, ``head`` the classifier (traditional transfer learning),
        ``bn+bias`` all tensors of norms, every bias, and the classifier.
        """
        if self.scheme == "head":
            return network.head
        if self.scheme == "bn+bias":
            norms = np.array(["norm" in network.operators[place].kind.lower() for place in network.place])
            biases = np.array([name.endswith("bias") for name in network.names])
            return np.asarray(norms | biases | network.head)
        return np.ones(len(network.names), dtype=bool)

    def spans(self, epochs: int) -> list[range]:
        """Epochs of each interval."""
        length = self.interval if self.selects or self.prunes else epochs
        return [range(start, min(start + length, epochs)) for start in range(0, epochs, length)]
