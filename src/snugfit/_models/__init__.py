"""Networks by name: the papers' networks, torchvision's, timm's and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from snugfit._core.known import unknown_model
from snugfit._core.registry import MODELS
from snugfit._models import external, recognition
from snugfit._models.recognition import Match, trained_image_size

__all__ = ["Match", "build", "names", "recognise", "trained_image_size"]

_BUILDERS: dict[str, Callable[[int, int, int], nn.Module]] = MODELS.load_all()


def names() -> tuple[str, ...]:
    """Names of the models that need no other package."""
    return tuple(_BUILDERS)


def recognise(shapes: Mapping[str, tuple[int, ...]]) -> Match | None:
    """The network of :func:`names` that weights belong to, by their names and shapes without the classifier, or None.

    Args:
        shapes: shape of each tensor, by its name in a state dict.
    """
    return recognition.recognise(shapes, _BUILDERS)


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
    if name in _BUILDERS:
        return _BUILDERS[name](classes, image_size, channels)
    source, separator, rest = name.partition(":")
    if separator and source == "torchvision":
        return external.from_torchvision(rest, classes, channels)
    if separator and source == "timm":
        return external.from_timm(rest, classes, channels)
    if separator:
        return external.from_callable(source, rest, classes)
    if external.torchvision_knows(name):
        return external.from_torchvision(name, classes, channels)
    raise unknown_model(name, names())
