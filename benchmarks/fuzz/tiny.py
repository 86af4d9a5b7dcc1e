"""A network of a few hundred weights, for run folders that are small enough to be kept."""

from torch import nn


def net(classes: int) -> nn.Module:
    """Two convolutions and a classifier, for grey images of 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes),
    )  # fmt: skip
