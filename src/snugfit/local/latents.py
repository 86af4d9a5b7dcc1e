"""The latents of a unit's feature map: adaptive average pooling to at most 2048 values (LLS, appendix A.1)."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from snugfit.lean import average_pool

LATENT_LIMIT = 2048
"""Most values per sample that a projection reads, if pooling can reach that."""


COARSEST_SIDE, WINDOW = 2, 8
"""Pooling windows are at least 8 x 8 pixels if 2 x 2 or more of them fit on the feature map."""


def pooled_side(channels: int, height: int, width: int, limit: int = LATENT_LIMIT, window: int = WINDOW) -> int:
    """Side of the pooled square feature map: the largest power of two that its size, the limit and the windows allow.

    It is 1 if even single pixels have more than ``limit`` values. The paper gives only the limit. The windows reproduce
    the sides that the authors set by hand for each layer of SmallConv, SmallConvL, VGG8 and MobileNetV1. Finer ones
    learn worse: docs/methods/lls.md.
    """
    shorter = min(height, width)
    side = int(max(1, min(math.sqrt(limit / channels), max(COARSEST_SIDE, shorter // window), shorter)))
    return 1 << (side.bit_length() - 1)


class Latents(nn.Module):
    """Turn a unit's output, (B, C, H, W) or (B, D), into latents (B, T).

    Args:
        shape: shape of one sample's output.
        limit: most values, if pooling alone can reach it; longer vectors are pooled too.
        window: smallest side of a pooling window in pixels, if 2 x 2 or more of them fit on the feature map.

    Attributes:
        length: T.
    """

    def __init__(self, shape: tuple[int, ...], limit: int = LATENT_LIMIT, window: int = WINDOW) -> None:
        super().__init__()
        self.side = pooled_side(*shape, limit=limit, window=window) if len(shape) == 3 else 0
        self.length = shape[0] * self.side**2 if self.side else min(shape[0], limit)

    def forward(self, features: Tensor) -> Tensor:
        """Compute latents (B, T) from (B, C, H, W) or (B, D)."""
        if self.side:
            return average_pool(features, self.side).flatten(1)
        if features.shape[1] == self.length:
            return features
        return F.adaptive_avg_pool1d(features[:, None], self.length)[:, 0]
