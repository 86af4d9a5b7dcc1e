"""The model after an exit is chosen: the units up to it, and its classifier (NeuroFlux section 5.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from snugfit._chain import split_tail
from snugfit.local.base import LocalLoss

if TYPE_CHECKING:
    from snugfit._chain import Chain


class ExitModel(nn.Module):
    """A trunk of units with the classifier of the last one.

    Args:
        trunk: images (B, C, H, W) to features.
        classifier: the local loss that trained the trunk's last unit; its ``predict`` gives logits (B, classes).
    """

    def __init__(self, trunk: nn.Module, classifier: LocalLoss) -> None:
        super().__init__()
        self.trunk, self.classifier = trunk, classifier

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (B, classes)."""
        return self.classifier.predict(self.trunk(images))


def trunk(chain: Chain, index: int, *, before_pool: bool = False) -> nn.Module:
    """Build one module from the units ``0..index`` of a chain; parameters are shared and keep their names.

    Args:
        chain: the chain.
        index: the last unit.
        before_pool: leave out the final pools and dropouts.
    """
    last = chain.units[index]
    if before_pool:
        body = split_tail(last.module)[0]
        last = replace(last, module=body, output_shape=last.map_shape)
    return replace(chain, units=chain.units[:index], head=last).to_module()
