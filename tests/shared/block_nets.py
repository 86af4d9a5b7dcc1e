"""Networks that cannot be divided and whose blocks can run again: ``block_nets:Tied`` on the command line."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Keeps much more than its input and its output, of the same shape."""

    def __init__(self, width: int = 8, dropout: float = 0.2, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width, momentum=momentum)])
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        maps = self.drop(self.norms[0](self.first(x)).relu())
        return (scale * self.norms[1](self.second(maps)) + x).relu()


class _Net(nn.Module):
    """Computes in the type of its weights, so that runs can be compared in float64."""

    def __init__(self, classes: int = 10, blocks: int = 3, channels: int = 1) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(channels, 8, 3, padding=1), nn.ModuleList(Block() for _ in range(blocks))
        self.fc = nn.Linear(8, classes)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(self.stem(x.to(self.fc.weight.dtype))).mean((2, 3)))


class Tied(_Net):
    def __init__(self, classes: int = 10, blocks: int = 3) -> None:
        super().__init__(classes, blocks)
        self.blocks[1].first.weight = self.blocks[0].first.weight


def deep(classes: int = 10) -> nn.Module:
    """Tied blocks, of which one image of 96 pixels keeps 25 MB."""
    return Tied(classes, blocks=12)


class OnData(_Net):
    """Brightness decides about the blocks, so that a graph and the meta device lack the branch."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(classes)
        self.blocks[1] = Block(momentum=None)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) if x.mean() > -1000 else x


class Twice(_Net):
    """Runs every block twice in a step."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(super().body(x))


class TwoInputs(_Net):
    """Reads a picture and three numbers, and has tied weights."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__(classes, channels=2)
        self.numbers, self.again = nn.Linear(3, 8), nn.Linear(3, 8)
        self.again.weight = self.numbers.weight

    def forward(self, photo: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        photo, numbers = (each.to(self.fc.weight.dtype) for each in (photo, numbers))
        maps = self.body(self.stem(photo) + self.numbers(numbers)[:, :, None, None])
        return self.fc(maps.mean((2, 3)) + self.again(numbers))


class Around(_Net):
    """A block before and one after a layer, which a branch on data precedes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(blocks=2)
        self.layer = layer

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if x.mean() > -1000:
            x = self.layer(x)
        return self.blocks[1](x)


NETWORKS: tuple[Callable[[], nn.Module], ...] = (Tied, OnData, Twice)


def made_by(make: Callable[[], nn.Module]) -> nn.Module:
    """A network with the same weights in every call."""
    torch.manual_seed(0)
    return make()
