"""VGG in its CIFAR form, and VGG-16 as it was for ImageNet (Simonyan and Zisserman, 2015, arXiv:1409.1556)."""

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
        round_up = image_size % 2 ** layout.count("pool") != 0  # if the image cannot be halved so often
        self.features = _features(layout, channels, norm=True, round_up=round_up)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(512, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, h, w) to logits (batch, classes)."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits


class ImageNetVGG(nn.Module):
    """Stacked 3x3 convolutions with ReLU and no BatchNorm, pooling to 7x7 and three linear layers with dropout 0.5.

    Maps (batch, channels, image_size, image_size) to (batch, classes); names and shapes are those of torchvision's VGG.

    Args:
        layout: width of each convolution, or ``"pool"`` for a max-pool that halves the feature map.
        classes: number of outputs.
        image_size: side of the square input in pixels.
        channels: channels of the input.
        hidden: width of the two hidden linear layers.
    """

    def __init__(
        self, layout: tuple[int | str, ...], classes: int, image_size: int, channels: int, hidden: int = 4096
    ) -> None:
        super().__init__()
        width = [item for item in layout if isinstance(item, int)][-1]
        round_up = image_size < 2 ** layout.count("pool")  # torchvision's pools round down, to nothing for tiny images
        self.features = _features(layout, channels, norm=False, round_up=round_up)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        layers: list[nn.Module] = []
        for inputs in (width * 7 * 7, hidden):
            layers += [nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5)]
        self.classifier = nn.Sequential(*layers, nn.Linear(hidden, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, h, w) to logits (batch, classes)."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits


def _features(layout: tuple[int | str, ...], channels: int, *, norm: bool, round_up: bool) -> nn.Sequential:
    """Convolutions with or without BatchNorm, and pools that round up or down."""
    layers: list[nn.Module] = []
    for item in layout:
        if isinstance(item, str):
            layers.append(nn.MaxPool2d(2, ceil_mode=round_up))
        else:
            norms = [nn.BatchNorm2d(item)] if norm else []
            layers += [nn.Conv2d(channels, item, 3, padding=1), *norms, nn.ReLU(inplace=True)]
            channels = item
    return nn.Sequential(*layers)


def vgg11(classes: int, image_size: int, channels: int) -> nn.Module:
    """VGG-11 for small images."""
    return VGG(_VGG11, classes, image_size, channels)


def vgg16(classes: int, image_size: int, channels: int) -> nn.Module:
    """VGG-16 for small images: 14,728,266 parameters for 10 classes.

    ImageNet weights are for :func:`vgg16_imagenet`.
    """
    return VGG(_VGG16, classes, image_size, channels)


def vgg19(classes: int, image_size: int, channels: int) -> nn.Module:
    """VGG-19 for small images: 20,040,522 parameters for 10 classes."""
    return VGG(_VGG19, classes, image_size, channels)


def vgg16_imagenet(classes: int, image_size: int, channels: int) -> nn.Module:
    """VGG-16 (configuration D, as torchvision's ``vgg16``): 138,357,544 parameters for 1000 classes."""
    return ImageNetVGG(_VGG16, classes, image_size, channels)


MODELS = {"vgg11": vgg11, "vgg16": vgg16, "vgg16_imagenet": vgg16_imagenet, "vgg19": vgg19}
