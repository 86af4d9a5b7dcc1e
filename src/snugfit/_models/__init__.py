"""Networks by name: the papers' networks, torchvision's, timm's and the user's own; weights by their shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from snugfit._core.known import unknown_model
from snugfit._core.registry import MODELS
from snugfit._models import external
from snugfit._models.initial import he_normal

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


class _Builders(Mapping[str, Builder]):
    """Functions that build the networks, by name; a module is imported when one of its networks is asked for."""

    def __getitem__(self, name: str) -> Builder:
        builder: Builder | None = MODELS.load(name)
        if builder is None:
            raise KeyError(name)
        return builder

    def __iter__(self) -> Iterator[str]:
        return iter(MODELS.names())

    def __len__(self) -> int:
        return len(MODELS.names())


_BUILDERS: Mapping[str, Builder] = _Builders()
_HE_NORMAL = {f"{__name__}.{family}" for family in ("mobilenet", "resnet", "vgg")}
"""Modules whose networks begin with He's weights."""


def names() -> tuple[str, ...]:
    """Names of the models that need no other package."""
    return tuple(_BUILDERS)


def resets(name: str) -> Mapping[type[nn.Module], Callable[[nn.Module], None]]:
    """Functions that initialise the layers of a network, by their types; other layers reset themselves.

    The networks of the LLS paper and YOLOv2 begin with torch's own weights.
    """
    return {nn.Conv2d: he_normal} if _BUILDERS[name].__module__ in _HE_NORMAL else {}


def recognise(shapes: Shapes) -> Match | None:
    """The network whose layers before the classifier all have these names and shapes; the largest if several fit.

    ``shapes`` are those of tensors by their names in a state dict.
    """
    trunks = {name: _trunk(builder) for name, builder in _BUILDERS.items()}
    fitting = {
        name: trunk for name, trunk in trunks.items() if trunk.shapes.items() <= shapes.items() and trunk.stem in shapes
    }
    if not fitting:
        return None
    name = max(fitting, key=lambda name: len(fitting[name].shapes))
    return Match(name, shapes[fitting[name].stem][1])


def trained_image_size(shapes: Shapes) -> int | None:
    """Side in pixels of the images that weights are for; None if their shapes do not say."""
    from snugfit._models.vit import POSITIONS, image_size_of

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


def import_builder(name: str) -> None:
    """Import what builds a network, before memory counts; nothing for one of the user's or of another package."""
    MODELS.load(name)


def build(name: str, classes: int, image_size: int, channels: int = 3) -> nn.Module:
    """Build a network; under ``torch.device("meta")`` it takes no memory.

    Args:
        name: one of :func:`names`, ``torchvision:NAME``, ``timm:NAME``, ``package.module:function`` of the user's own
            (found from the current directory too), or the plain name of a torchvision model.
        classes: number of outputs.
        image_size: side of the square input in pixels.
        channels: channels of the input.

    Returns:
        A module that maps (batch, channels, image_size, image_size) to (batch, classes), or a detector that maps it to
        (batch, anchors * (5 + classes), rows, columns).

    Raises:
        UnknownNameError: no such model.
        ModelError: a package is missing, or the user's function fails or returns no module.
    """
    builder = _BUILDERS.get(name)
    if builder is not None:
        return builder(classes, image_size, channels)
    source, separator, rest = name.partition(":")
    if separator and source == "torchvision":
        return external.from_torchvision(rest, classes, channels)
    if separator and source == "timm":
        return external.from_timm(rest, classes, channels)
    if separator:
        return external.from_callable(name, classes)
    if external.torchvision_knows(name):
        return external.from_torchvision(name, classes, channels)
    raise unknown_model(name, names())
