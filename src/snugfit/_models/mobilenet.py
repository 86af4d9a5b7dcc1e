"""MobileNetV2, with torchvision's state-dict names and shapes."""

from __future__ import annotations

import torch
from torch import nn

_STAGES = (  # expansion, output channels, blocks, stride of the first (Sandler et al., Table 2)
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise 3x3, project 1x1; added to its input if the shapes are equal."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.residual = stride == 1 and in_channels == out_channels
        expand = [_conv_norm_activation(in_channels, hidden, 1)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *expand,
            _conv_norm_activation(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, in_channels, h, w) to (batch, out_channels, h / stride, w / stride)."""
        y: torch.Tensor = self.conv(x)
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """Stem, 17 inverted residuals, a 1x1 convolution, global average pooling and a classifier with dropout 0.2.

    Maps (batch, channels, h, w) to (batch, classes).
    """

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_norm_activation(channels, 32, 3, stride=2)]
        width = 32
        for expansion, out_channels, blocks, first_stride in _STAGES:
            for index in range(blocks):
                layers.append(InvertedResidual(width, out_channels, first_stride if index == 0 else 1, expansion))
                width = out_channels
        layers.append(_conv_norm_activation(width, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, h, w) to logits (batch, classes)."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits


def _conv_norm_activation(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU6(inplace=True),
    )


def mobilenet_v2(classes: int, image_size: int, channels: int) -> nn.Module:
    """MobileNetV2 at width 1: 3,504,872 parameters for 1000 classes."""
    return MobileNetV2(classes, channels)


MODELS = {"mobilenet_v2": mobilenet_v2}
