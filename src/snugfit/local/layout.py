"""Assign a local loss to every unit of a chain (NeuroFlux section 5.2, Profiler)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from snugfit.local.auxiliary import is_initial
from snugfit.local.base import LocalLoss, NetworkFacts, UnitShape
from snugfit.local.exit_model import ExitModel, trunk
from snugfit.local.registry import build_local_loss

if TYPE_CHECKING:
    from snugfit.chain import Chain


class HeadLoss(LocalLoss):
    """The network's own head as the last unit's local loss (NOTES NeuroFlux 2)."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def predict(self, features: Tensor) -> Tensor:
        """Logits (B, classes) of the network."""
        logits: Tensor = self.head(features)
        return logits


@dataclass(frozen=True)
class Layout:
    """A chain and the local loss of each of its units.

    Attributes:
        chain: the chain; units not in use are on the meta device.
        local_loss: name of the local loss.
        network: narrowest and widest conv, and classes.
    """

    chain: Chain
    local_loss: str
    network: NetworkFacts

    @classmethod
    def of(cls, chain: Chain, local_loss: str, classes: int) -> Layout:
        """Assign local losses to a chain."""
        widths = [conv.out_channels for unit in chain.units for conv in unit.convs]
        return cls(chain, local_loss, NetworkFacts.from_widths(widths, classes))

    def __len__(self) -> int:
        return len(self.chain.units)

    def is_last(self, index: int) -> bool:
        """Whether a unit's local loss is the network's own head."""
        return index == len(self) - 1

    def make_loss(self, index: int) -> LocalLoss:
        """The local loss of a unit, on the meta device; the last unit's wraps the chain's head itself."""
        if self.is_last(index):
            return HeadLoss(self.chain.head.module)
        units = self.chain.units[: index + 1]
        sizes = [unit.convs[-1].output_size for unit in units if unit.convs]
        height, width = self.chain.input_shape[-2:]
        shape = UnitShape(tuple(units[-1].output_shape), bool(sizes) and is_initial((height, width), sizes))
        with torch.device("meta"):
            return build_local_loss(self.local_loss, shape, self.network)

    def exit_parameters(self, index: int) -> int:
        """Parameters of the exit model after a unit: all units up to it, and its own classifier."""
        trunk_parameters = sum(unit.parameters for unit in self.chain.units[: index + 1])
        return trunk_parameters + sum(parameter.numel() for parameter in self.make_loss(index).parameters())

    def exit_model(self, index: int, loss: LocalLoss | None = None) -> nn.Module:
        """The model cut after a unit; with the last unit it is the whole network.

        Args:
            index: the unit.
            loss: its trained local loss; a new one on the meta device by default.
        """
        if self.is_last(index):
            return self.chain.to_module()
        return ExitModel(trunk(self.chain, index), loss or self.make_loss(index))
