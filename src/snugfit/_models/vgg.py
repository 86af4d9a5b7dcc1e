"""VGG in its CIFAR form, and VGG-16 as it was for ImageNet (Simonyan and Zisserman, 2015, arXiv:1409.1556)."""

from __future__ import annotations

from torch import nn

from snugfit._models.feature_network import FeatureNetwork, Layout, cannot_halve, convolutions, last_width

_VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
_VGG16 = (64, 64, "pool", 128, 128, "pool", *(256,) * 3, "pool", *(512,) * 3, "pool", *(512,) * 3, "pool")
_VGG19 = (64, 64, "pool", 128, 128, "pool", *(256,) * 4, "pool", *(512,) * 4, "pool", *(512,) * 4, "pool")


class VGG(FeatureNetwork):
    """Stacked 3x3 convolutions with BatchNorm and ReLU, global average pooling and one linear layer."""

    def __init__(self, layout: Layout, classes: int, image_size: int, channels: int) -> None:
        features = convolutions(layout, channels, nn.ReLU, round_up=cannot_halve(image_size, layout))
        super().__init__(features, 1, nn.Linear(512, classes))


class ImageNetVGG(FeatureNetwork):
    """Stacked 3x3 convolutions with ReLU and no BatchNorm, pooling to 7x7 and three linear layers with dropout 0.5.

    Names and shapes are those of torchvision's VGG; ``hidden`` is the width of the two hidden linear layers.
    """

    def __init__(self, layout: Layout, classes: int, image_size: int, channels: int, hidden: int = 4096) -> None:
        round_up = image_size < 2 ** list(layout).count(
            "pool"
        )  # torchvision's pools round down, to nothing for tiny images
        features = convolutions(layout, channels, nn.ReLU, round_up=round_up, norm=False)
        layers: list[nn.Module] = []
        for inputs in (last_width(layout) * 7 * 7, hidden):
            layers += [nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5)]
        super().__init__(features, 7, nn.Sequential(*layers, nn.Linear(hidden, classes)))


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
