"""ResNet-18 for small images: 3x3 stem, no max-pool."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class PadShortcut(nn.Module):
    """Parameter-free shortcut (option A of He et al.): every ``stride``-th pixel, new channels zero."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (out_channels - in_channels) // 2
        self.after = out_channels - in_channels - self.before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, in_channels, h, w) to (batch, out_channels, h / stride, w / stride)."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, added to a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, projection: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = (
                nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))
                if projection
                else PadShortcut(in_channels, out_channels, stride)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, in_channels, h, w) to (batch, out_channels, h / stride, w / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        out: torch.Tensor = self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))
        return out


class ResNet18(nn.Module):
    """Stem, eight basic blocks in four stages, global average pooling and one linear layer.

    Maps (batch, channels, h, w) to (batch, classes).
    """

    def __init__(self, classes: int, channels: int, projection: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(64, 64, 1, projection)
        self.layer2 = _stage(64, 128, 2, projection)
        self.layer3 = _stage(128, 256, 2, projection)
        self.layer4 = _stage(256, 512, 2, projection)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, h, w) to logits (batch, classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def _stage(in_channels: int, out_channels: int, stride: int, projection: bool) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(in_channels, out_channels, stride, projection), BasicBlock(out_channels, out_channels, 1, projection)
    )


def resnet18(classes: int, image_size: int, channels: int) -> nn.Module:
    """ResNet-18 with parameter-free shortcuts: 11,000,138 parameters for 10 classes (NeuroFlux, Table 2)."""
    return ResNet18(classes, channels, projection=False)


def resnet18_projection(classes: int, image_size: int, channels: int) -> nn.Module:
    """ResNet-18 with 1x1 convolution shortcuts: 11,173,962 parameters for 10 classes."""
    return ResNet18(classes, channels, projection=True)


MODELS = {"resnet18": resnet18, "resnet18_projection": resnet18_projection}
