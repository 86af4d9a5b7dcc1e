"""Networks by name: the papers' networks, torchvision's, timm's and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from snugfit._core.known import unknown_model
from snugfit._models import external, recognition
from snugfit._models.lls import smallconv, smallconvl, vgg8
from snugfit._models.mobilenet import mobilenet_v2
from snugfit._models.mobilenet_v1 import mobilenet_v1
from snugfit._models.recognition import Match, trained_image_size
from snugfit._models.resnet import resnet18, resnet18_projection
from snugfit._models.resnet50 import resnet50
from snugfit._models.vgg import vgg11, vgg16, vgg16_imagenet, vgg19
from snugfit._models.vit import vit_b_16
from snugfit._models.yolo import yolov2_16

__all__ = ["Match", "build", "names", "recognise", "trained_image_size"]

_BUILDERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "smallconv": smallconv,
    "smallconvl": smallconvl,
    "vgg8": vgg8,
    "vgg11": vgg11,
    "vgg16": vgg16,
    "vgg16_imagenet": vgg16_imagenet,
    "vgg19": vgg19,
    "resnet18": resnet18,
    "resnet18_projection": resnet18_projection,
    "resnet50": resnet50,
    "mobilenet_v1": mobilenet_v1,
    "mobilenet_v2": mobilenet_v2,
    "vit_b_16": vit_b_16,
    "yolov2_16": yolov2_16,
}


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
