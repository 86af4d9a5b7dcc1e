"""MobileNetV2, with torchvision's state-dict names and shapes, and the MobileNetV1 of the LLS paper."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from snugfit._models.feature_network import FeatureNetwork

_STAGES = (  # expansion, output channels, blocks, stride of the first (Sandler et al., Table 2)
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_V1_BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
"""Output channels and stride (Howard et al., 2017, Table 1, without its classifier)."""


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


class MobileNetV2(FeatureNetwork):
    """Stem, 17 inverted residuals, a 1x1 convolution, global average pooling and a classifier with dropout 0.2."""

    def __init__(self, classes: int, channels: int) -> None:
        layers: list[nn.Module] = [_conv_norm_activation(channels, 32, 3, stride=2)]
        width = 32
        for expansion, out_channels, blocks, first_stride in _STAGES:
            for index in range(blocks):
                layers.append(InvertedResidual(width, out_channels, first_stride if index == 0 else 1, expansion))
                width = out_channels
        layers.append(_conv_norm_activation(width, 1280, 1))
        super().__init__(nn.Sequential(*layers), 1, nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes)))


def _conv_norm_activation(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU6(inplace=True),
    )


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


class MobileNetV1(FeatureNetwork):
    """A conv block of stride 2, 13 depthwise blocks, adaptive average pooling to 2x2 and a linear layer (LLS, Table 4).

    The table's strides are strides of the depthwise convolutions.
    """

    def __init__(self, classes: int, channels: int) -> None:
        previous = 32
        stem = [nn.Conv2d(channels, previous, 3, 2, padding=1), nn.BatchNorm2d(previous), nn.LeakyReLU(inplace=True)]
        blocks: list[nn.Module] = [nn.Sequential(*stem)]
        for out_channels, stride in _V1_BLOCKS:
            blocks.append(ConvDWBlock(previous, out_channels, stride))
            previous = out_channels
        super().__init__(nn.Sequential(*blocks), 2, nn.Linear(4 * previous, classes))


def mobilenet_v1(classes: int, image_size: int, channels: int) -> nn.Module:
    """MobileNetV1: 3.2M parameters at width 1, its classifier apart."""
    return MobileNetV1(classes, channels)


def mobilenet_v2(classes: int, image_size: int, channels: int) -> nn.Module:
    """MobileNetV2 at width 1: 3,504,872 parameters for 1000 classes."""
    return MobileNetV2(classes, channels)


MODELS = {"mobilenet_v2": mobilenet_v2, "mobilenet_v1": mobilenet_v1}
