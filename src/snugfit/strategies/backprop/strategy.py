"""Plain backpropagation at the largest batch, or micro-batch, that fits: the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from snugfit._core.profile import UnitStats
from snugfit.strategies.full_network import PLAIN_PROBE, FullNetwork, MakeTrainer, by_own_loss


@dataclass(frozen=True)
class Backprop(FullNetwork):
    """Backpropagation through the whole network.

    If the effective batch fits, every gradient is applied and freed in the backward pass. Otherwise micro-batches are
    accumulated to it. Accumulation holds all gradients; if they do not fit either, the effective batch is lowered, and
    the plan says so.
    """

    name: ClassVar[str] = "backprop"
    probe: ClassVar[str] = PLAIN_PROBE

    def make_trainer(self, units: Sequence[UnitStats]) -> MakeTrainer:
        """Trainers with the network's own loss and the chain's own forward pass."""
        return by_own_loss(lambda chain: chain.forward)
