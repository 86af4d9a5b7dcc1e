"""ResNet-18 and ResNet-20 for small images, with a 3x3 stem and no max-pool, and ResNet-50 for ImageNet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

_RESNET18 = (2, 2, 2, 2)  # basic blocks per stage
_RESNET20 = (3, 3, 3)
_RESNET50 = (3, 4, 6, 3)  # bottlenecks per stage (He et al., 2016, arXiv:1512.03385, Table 1)
_EXPANSION = 4


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


class BasicResNet(nn.Module):
    """3x3 stem, stages of basic blocks, global average pooling and one linear layer.

    Every stage but the first halves the feature map and doubles the width, which is ``width`` in the first.
    """

    def __init__(self, classes: int, channels: int, projection: bool, blocks: Sequence[int], width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.stages = [f"layer{stage}" for stage in range(1, len(blocks) + 1)]
        before = width
        for index, (stage, count) in enumerate(zip(self.stages, blocks, strict=True)):
            after = width * 2**index
            self.add_module(stage, _stage(before, after, count, 2 if index else 1, projection))
            before = after
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, h, w) to logits (batch, classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        logits: torch.Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def _stage(in_channels: int, out_channels: int, count: int, stride: int, projection: bool) -> nn.Sequential:
    first = BasicBlock(in_channels, out_channels, stride, projection)
    return nn.Sequential(first, *(BasicBlock(out_channels, out_channels, 1, projection) for _ in range(count - 1)))


def resnet18(classes: int, image_size: int, channels: int) -> nn.Module:
    """ResNet-18 with parameter-free shortcuts: 11,000,138 parameters for 10 classes (NeuroFlux, Table 2)."""
    return BasicResNet(classes, channels, False, _RESNET18, 64)


def resnet18_projection(classes: int, image_size: int, channels: int) -> nn.Module:
    """ResNet-18 with 1x1 convolution shortcuts: 11,173,962 parameters for 10 classes."""
    return BasicResNet(classes, channels, True, _RESNET18, 64)


def resnet20(classes: int, image_size: int, channels: int) -> nn.Module:
    """ResNet-20 of He et al., section 4.2, with parameter-free shortcuts: 269,722 parameters for 10 classes."""
    return BasicResNet(classes, channels, False, _RESNET20, 16)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm, added to a shortcut.

    The stride is in the 3x3 convolution (torchvision's "v1.5"), not in the first 1x1 as in the paper: weights trained
    for the one do not serve the other.
    """

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = _EXPANSION * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, in_channels, h, w) to (batch, 4 width, h / stride, w / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        out: torch.Tensor = self.relu(self.bn3(self.conv3(y)) + self.downsample(x))
        return out


class BottleneckResNet(nn.Module):
    """7x7 stem with max-pool, four stages of bottlenecks, global average pooling and one linear layer.

    Names and shapes are torchvision's. ``width`` is that of the stem; stages are 1, 2, 4 and 8 times as wide inside,
    and four times that outside.
    """

    def __init__(self, classes: int, channels: int, blocks: Sequence[int] = _RESNET50, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = _bottlenecks(width, width, blocks[0], stride=1)
        self.layer2 = _bottlenecks(4 * width, 2 * width, blocks[1], stride=2)
        self.layer3 = _bottlenecks(8 * width, 4 * width, blocks[2], stride=2)
        self.layer4 = _bottlenecks(16 * width, 8 * width, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, h, w) to logits (batch, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def _bottlenecks(in_channels: int, width: int, count: int, stride: int) -> nn.Sequential:
    first = Bottleneck(in_channels, width, stride)
    return nn.Sequential(first, *(Bottleneck(_EXPANSION * width, width, 1) for _ in range(count - 1)))


def resnet50(classes: int, image_size: int, channels: int) -> nn.Module:
    """ResNet-50 (v1.5): 25,557,032 parameters for 1000 classes."""
    return BottleneckResNet(classes, channels)


MODELS = {
    "resnet18": resnet18,
    "resnet18_projection": resnet18_projection,
    "resnet20": resnet20,
    "resnet50": resnet50,
}
