"""Local Losses: a trainable linear projection of a unit's latents (Nokland and Eidnes, 2019; LLS, Table 3)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from snugfit.local.base import LocalLoss, NetworkStats, UnitShape
from snugfit.local.latents import Latents


class LinearLocalLoss(LocalLoss):
    """Average pooling to at most 2048 values and one linear layer without bias: LLS with a trained basis."""

    before_pool: ClassVar[bool] = True
    detached_head: ClassVar[bool] = True
    gives_up_gradient: bool = True

    def __init__(self, unit: UnitShape, network: NetworkStats) -> None:
        super().__init__()
        self.latents = Latents(unit.map_shape)
        self.pooled_side = self.latents.side or None
        self.linear = nn.Linear(self.latents.length, network.classes, bias=False)

    def predict(self, features: Tensor) -> Tensor:
        """Return logits (B, K) of features (B, C, H, W) or (B, D)."""
        logits: Tensor = self.linear(self.latents(features))
        return logits


LOSSES = {"linear": LinearLocalLoss}
