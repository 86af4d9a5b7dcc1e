"""Recognise the network of some weights by their names and shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from snugfit._models.vit import POSITIONS, image_size_of

Shapes = Mapping[str, tuple[int, ...]]
Builder = Callable[[int, int, int], nn.Module]


class Match(NamedTuple):
    """A network that weights fit: its name, and the channels of its input."""

    model: str
    channels: int


class _Trunk(NamedTuple):
    """A network without its classifier.

    Attributes:
        shapes: of the tensors that depend neither on the number of classes nor on the image.
        stem: name of the convolution that depends on the image's channels.
    """

    shapes: dict[str, tuple[int, ...]]
    stem: str


def recognise(shapes: Shapes, builders: Mapping[str, Builder]) -> Match | None:
    """The network whose layers before the classifier all have these names and shapes; the largest if several fit.

    Args:
        shapes: shape of each tensor, by its name in a state dict.
        builders: networks to compare with, by name; they are built on the meta device.
    """
    trunks = {name: _trunk(builder) for name, builder in builders.items()}
    fitting = {
        name: trunk for name, trunk in trunks.items() if trunk.shapes.items() <= shapes.items() and trunk.stem in shapes
    }
    if not fitting:
        return None
    name = max(fitting, key=lambda name: len(fitting[name].shapes))
    return Match(name, shapes[fitting[name].stem][1])


def trained_image_size(shapes: Shapes) -> int | None:
    """Side in pixels of the images that weights are for; None if their shapes do not say."""
    return image_size_of(shapes.get(POSITIONS, ()))


@functools.cache
def _trunk(builder: Builder) -> _Trunk:
    """Compare two networks that differ in classes, image size and channels: tensors that differ depend on these."""
    one, other = _shapes(builder, 2, 32, 3), _shapes(builder, 5, 64, 1)
    varying = [name for name in one if one[name] != other[name]]
    classifier = {_top(name) for name in varying if (one[name][0], other[name][0]) == (2, 5)}
    stem = next(name for name in varying if len(one[name]) == 4)
    counters = {name for name in one if name.endswith("num_batches_tracked")}
    kept = {name for name in one if _top(name) not in classifier} - {*varying, *counters}
    return _Trunk({name: one[name] for name in kept}, stem)


def _shapes(builder: Builder, classes: int, image_size: int, channels: int) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        state = builder(classes, image_size, channels).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _top(name: str) -> str:
    return name.partition(".")[0]
