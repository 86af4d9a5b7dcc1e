"""The form of most networks here: features, such as convolutions and pools, average pooling and a classifier."""

from __future__ import annotations

import torch
from torch import nn

POOL = "pool"
Layout = tuple[int | str, ...]
"""Width of each 3x3 convolution, or ``"pool"`` for a max-pool that halves the feature map."""


class FeatureNetwork(nn.Module):
    """Features, adaptive average pooling to ``pooled`` x ``pooled``, and a classifier of the flattened feature map.

    Maps (batch, channels, image_size, image_size) to (batch, classes).
    """

    def __init__(self, features: nn.Module, pooled: int, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = classifier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, h, w) to logits (batch, classes)."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits


def convolutions(
    layout: Layout,
    channels: int,
    activation: type[nn.ReLU | nn.LeakyReLU],
    *,
    round_up: bool,
    norm: bool = True,
) -> nn.Sequential:
    """Convolutions with activations, with or without BatchNorm, and pools."""
    layers: list[nn.Module] = []
    for item in layout:
        if isinstance(item, int):
            norms = [nn.BatchNorm2d(item)] if norm else []
            layers += [nn.Conv2d(channels, item, 3, padding=1), *norms, activation(inplace=True)]
            channels = item
        else:
            layers.append(nn.MaxPool2d(2, ceil_mode=round_up))
    return nn.Sequential(*layers)


def last_width(layout: Layout) -> int:
    """Channels of the last convolution."""
    return [item for item in layout if isinstance(item, int)][-1]


def cannot_halve(image_size: int, layout: Layout) -> bool:
    """Whether a side of ``image_size`` pixels cannot be halved as often as there are pools."""
    return bool(image_size % 2 ** layout.count(POOL))
