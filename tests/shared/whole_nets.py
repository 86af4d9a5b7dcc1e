"""Networks that cannot be divided into units, by function: ``whole_nets:tied`` on the command line."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class _Net(nn.Module):
    """Computes in the type of its weights, so that runs can be compared in float64."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.fc = nn.BatchNorm2d(8), nn.Linear(8, classes)

    def classify(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x).relu().mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.conv(self.stem(x.to(self.fc.weight.dtype)).relu()))


class SameLayerTwice(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.conv(self.conv(self.stem(x.to(self.fc.weight.dtype)).relu()).relu()))


class Tied(_Net):
    def __init__(self, classes: int = 10) -> None:
        super().__init__(classes)
        self.again = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.again.weight = self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.again(self.conv(self.stem(x.to(self.fc.weight.dtype)).relu()).relu()))


class OnData(_Net):
    """Brightness decides about a layer, so that a graph and the meta device lack the branch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.to(self.fc.weight.dtype)).relu()
        return self.classify(self.conv(x) if x.mean() > 0.001 else x)


class DataShaped(_Net):
    """The feature maps that are positive anywhere; how many they are depends on the images."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.to(self.fc.weight.dtype)).relu()
        return self.classify(self.conv(x)) * len(torch.nonzero(x.amax((0, 2, 3)) > 0)) / 8


class OnMode(_Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.stem(x.to(self.fc.weight.dtype)).relu())
        return self.classify(x * 1.1 if self.training else x)


class Unused(_Net):
    def __init__(self, classes: int = 10) -> None:
        super().__init__(classes)
        self.spare = nn.Parameter(torch.ones(3))


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))


def hooked(classes: int = 10) -> nn.Module:
    """A hook of a container, which a graph of layers would lose."""
    made = _Net(classes)
    made.register_forward_hook(lambda module, given, output: output * 2)
    return made


def linear(classes: int = 10) -> nn.Module:
    """A single layer: nothing to split."""
    return nn.Sequential(nn.Flatten(), _Linear(256, classes))


REASONS: dict[Callable[[], nn.Module], str] = {
    SameLayerTwice: "tied weights: conv.weight",
    Tied: "tied weights: conv.weight (unit conv) and again.weight",
    OnData: "OnData cannot be traced: symbolically traced variables",
    DataShaped: "DataShaped cannot be traced",
    OnMode: "OnMode.forward takes another path in training mode",
    Unused: "parameter spare is never used in forward",
    hooked: "a forward hook of the model (_Net) would be lost",
    linear: "Sequential has nothing to split",
}
"""What makes a network that cannot be divided, and how the reason begins."""
