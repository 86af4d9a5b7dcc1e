"""Networks small enough for end-to-end tests, by function: ``tiny_nets:cnn`` on the command line."""

from __future__ import annotations

from torch import nn


def _conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def cnn(classes: int = 10) -> nn.Module:
    """Four conv units whose maps shrink, so that each unit holds fewer bytes per image than the one before."""
    layers = [*_conv(1, 16), *_conv(16, 16, 2), *_conv(16, 24, 2), *_conv(24, 24, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, classes))


def detector(classes: int = 2) -> nn.Module:
    """A network that finds boxes on a quarter of the image's side, with three anchors."""
    layers = [*_conv(3, 16), *_conv(16, 24, 2), *_conv(24, 24, 2)]
    return nn.Sequential(*layers, nn.Conv2d(24, 3 * (5 + classes), 1))


def dropout_cnn(classes: int = 10) -> nn.Module:
    """A network whose training draws random numbers in every step."""
    layers = [*_conv(1, 8), nn.Dropout(0.2), *_conv(8, 16, 2), nn.Dropout(0.2), *_conv(16, 16, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


def normless(classes: int = 10) -> nn.Module:
    """A network without BatchNorm: the gradient of a batch is the mean of those of its parts."""
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


def three_channels(classes: int = 10) -> nn.Module:
    """A network for colour images."""
    layers = [*_conv(3, 8), *_conv(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes)]
    return nn.Sequential(*layers)


def pooled(classes: int = 10) -> nn.Module:
    """Three conv units that end in pools, and a linear one."""
    layers = [*_conv(1, 16), nn.MaxPool2d(2), *_conv(16, 24), nn.MaxPool2d(2), *_conv(24, 24), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, 512), nn.ReLU(), nn.Linear(512, classes))


def heavy(classes: int = 10) -> nn.Module:
    """A network most of whose bytes are weights: what it takes follows from which of them train."""
    layers = [nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 1024), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, classes))


def wide(classes: int = 10) -> nn.Module:
    """A network whose first map is nearly all that it needs."""
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.LeakyReLU(inplace=True), nn.MaxPool2d(4)]
    layers += [nn.Conv2d(64, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, classes))


def group_normed(classes: int = 10) -> nn.Module:
    """Every normalisation but BatchNorm, the first of them on the images, which need no gradient."""
    layers = [nn.GroupNorm(1, 1), nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3, 2, 1), nn.LayerNorm([16, 4, 4]), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


def late_normed(classes: int = 10) -> nn.Module:
    """A network that can be cut into tiles, with GroupNorm behind what is cut."""
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))


def single_normed(classes: int = 10) -> nn.Module:
    """Units of one layer with GroupNorm behind it."""
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
