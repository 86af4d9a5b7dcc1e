"""The lightest local loss: average pooling and one linear layer (the prediction head of Nokland and Eidnes, 2019)."""

from __future__ import annotations

from math import ceil

from torch import Tensor, nn

from snugfit.local.base import LocalLoss, NetworkFacts, UnitShape

FEATURE_LIMIT = 4096
"""Most features that the linear layer reads, as long as pooling can bring them down to it."""


def pool_kernel(channels: int, height: int, width: int, limit: int = FEATURE_LIMIT) -> tuple[int, int]:
    """Smallest pooling kernel, doubled in height and width by turns, that leaves at most ``limit`` features.

    Pooling rounds up: a side of 7 pooled by 2 leaves 4. Where even a 1x1 map has more than ``limit`` channels, the
    kernel pools to 1x1.
    """
    kernel = [1, 1]
    axis = 0
    while channels * ceil(height / kernel[0]) * ceil(width / kernel[1]) > limit:
        if kernel[0] >= height and kernel[1] >= width:
            break
        kernel[axis] *= 2
        axis = 1 - axis
    return kernel[0], kernel[1]


class LinearLocalLoss(LocalLoss):
    """Average pooling until at most 4096 features are left, one linear layer, cross entropy."""

    def __init__(self, unit: UnitShape, network: NetworkFacts) -> None:
        super().__init__()
        self.pool: nn.Module = nn.Identity()
        features = unit.output_shape[0]
        if not unit.flat:
            channels, height, width = unit.output_shape
            kernel = pool_kernel(channels, height, width)
            self.pool = nn.AvgPool2d(kernel, ceil_mode=True)
            features = channels * ceil(height / kernel[0]) * ceil(width / kernel[1])
        self.linear = nn.Linear(features, network.classes)

    def predict(self, features: Tensor) -> Tensor:
        """Return logits (B, K) of features (B, C, H, W) or (B, D)."""
        logits: Tensor = self.linear(self.pool(features).flatten(1))
        return logits
