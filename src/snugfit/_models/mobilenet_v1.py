"""MobileNetV1 of the LLS paper (Table 4); the table's strides are strides of the depthwise convolutions."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

_BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
"""Output channels and stride (Howard et al., 2017, Table 1, without its classifier)."""


class ConvDWBlock(nn.Sequential):
    """Depthwise 3x3, BatchNorm, pointwise 1x1, BatchNorm, LeakyReLU: five layers (LLS paper, appendix A.1).

    Maps (batch, in_channels, h, w) to (batch, out_channels, h / stride, w / stride).
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__(
            OrderedDict(
                depthwise=nn.Conv2d(in_channels, in_channels, 3, stride, padding=1, groups=in_channels, bias=False),
                depthwise_norm=nn.BatchNorm2d(in_channels),
                pointwise=nn.Conv2d(in_channels, out_channels, 1, bias=False),
                pointwise_norm=nn.BatchNorm2d(out_channels),
                activation=nn.LeakyReLU(inplace=True),
            )
        )


class MobileNetV1(nn.Module):
    """A conv block of stride 2, 13 depthwise blocks, adaptive average pooling to 2x2 and a linear layer.

    Maps (batch, channels, h, w) to (batch, classes).

    Args:
        classes: number of outputs.
        channels: channels of the input.
        width: factor of all widths.
    """

    def __init__(self, classes: int, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        previous = _scaled(32, width)
        stem = [nn.Conv2d(channels, previous, 3, 2, padding=1), nn.BatchNorm2d(previous), nn.LeakyReLU(inplace=True)]
        blocks: list[nn.Module] = [nn.Sequential(*stem)]
        for out_channels, stride in _BLOCKS:
            blocks.append(ConvDWBlock(previous, _scaled(out_channels, width), stride))
            previous = _scaled(out_channels, width)
        self.features = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Linear(4 * previous, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, h, w) to logits (batch, classes)."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits


def _scaled(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def mobilenet_v1(classes: int, image_size: int, channels: int, *, width: float = 1.0) -> nn.Module:
    """MobileNetV1: 3.2M parameters at width 1, its classifier apart."""
    return MobileNetV1(classes, channels, width)


MODELS = {"mobilenet_v1": mobilenet_v1}
