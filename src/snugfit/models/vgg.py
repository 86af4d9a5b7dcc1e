"""VGG in its CIFAR form."""

from __future__ import annotations

import torch
from torch import nn

_VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
_VGG16 = (64, 64, "pool", 128, 128, "pool", *(256,) * 3, "pool", *(512,) * 3, "pool", *(512,) * 3, "pool")
_VGG19 = (64, 64, "pool", 128, 128, "pool", *(256,) * 4, "pool", *(512,) * 4, "pool", *(512,) * 4, "pool")


class VGG(nn.Module):
    """Stacked 3x3 convolutions with BatchNorm and ReLU, global average pooling and one linear layer.

    Maps (batch, channels, image_size, image_size) to (batch, classes).
    """

    def __init__(self, layout: tuple[int | str, ...], classes: int, image_size: int, channels: int) -> None:
        super().__init__()
        self.features = _features(layout, image_size, channels)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(512, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits


def _features(layout: tuple[int | str, ...], image_size: int, channels: int) -> nn.Sequential:
    """Convolution stack; pools round up only where the image cannot be halved so often."""
    round_up = image_size % 2 ** layout.count("pool") != 0
    layers: list[nn.Module] = []
    for item in layout:
        if isinstance(item, str):
            layers.append(nn.MaxPool2d(2, ceil_mode=round_up))
        else:
            layers += [nn.Conv2d(channels, item, 3, padding=1), nn.BatchNorm2d(item), nn.ReLU(inplace=True)]
            channels = item
    return nn.Sequential(*layers)


def vgg11(classes: int, image_size: int, channels: int) -> nn.Module:
    """VGG-11 for small images."""
    return VGG(_VGG11, classes, image_size, channels)


def vgg16(classes: int, image_size: int, channels: int) -> nn.Module:
    """VGG-16 for small images: 14,728,266 parameters for 10 classes."""
    return VGG(_VGG16, classes, image_size, channels)


def vgg19(classes: int, image_size: int, channels: int) -> nn.Module:
    """VGG-19 for small images: 20,040,522 parameters for 10 classes."""
    return VGG(_VGG19, classes, image_size, channels)
