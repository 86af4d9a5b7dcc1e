"""What a projection reads of a unit's map: adaptive average pooling to at most 2048 values (LLS, appendix A.1)."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from snugfit.lean import average_pool

LATENT_LIMIT = 2048
"""Most values that a projection reads of one sample, as long as pooling can bring them down to it."""


def pooled_side(channels: int, height: int, width: int, limit: int = LATENT_LIMIT) -> int:
    """Largest power of two, not above the map's shorter side, whose square map of all channels has ``limit`` values.

    1 where even single pixels have more. VGG8 on CIFAR-10: 4, 2, 2, 2, 2, 2, as the authors set by hand.
    """
    side = int(max(1, min(math.sqrt(limit / channels), height, width)))
    return 1 << (side.bit_length() - 1)


class Latents(nn.Module):
    """Turn a unit's output, (B, C, H, W) or (B, D), into latents (B, T).

    Args:
        shape: shape of one sample's output.
        limit: most values, where pooling alone can keep to it; a vector that is longer is pooled too.

    Attributes:
        length: T.
    """

    def __init__(self, shape: tuple[int, ...], limit: int = LATENT_LIMIT) -> None:
        super().__init__()
        self.side = pooled_side(*shape, limit=limit) if len(shape) == 3 else 0
        self.length = shape[0] * self.side**2 if self.side else min(shape[0], limit)

    def forward(self, features: Tensor) -> Tensor:
        """Latents of a batch."""
        if self.side:
            return average_pool(features, self.side).flatten(1)
        if features.shape[1] == self.length:
            return features
        return F.adaptive_avg_pool1d(features[:, None], self.length)[:, 0]
