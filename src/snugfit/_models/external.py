"""Networks that come from elsewhere: torchvision, timm, and the user's own functions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from snugfit._core.functions import attempt, call_function
from snugfit._core.known import keeping_torch
from snugfit.errors import ModelError, UnknownNameError, reason_of

_DETECTION = ("nms", "qnms")
"""Operators that torchvision refers to at import, even if its compiled part is not loaded."""


def torchvision_knows(name: str) -> bool:
    """Whether torchvision is installed and has a classification model of this name."""
    try:
        models = _package("torchvision.models", "torchvision")
    except ModelError:
        return False
    return name in models.list_models(module=models)


def from_torchvision(name: str, classes: int, channels: int) -> nn.Module:
    """Build a torchvision classification model with fresh weights."""
    models = _package("torchvision.models", "torchvision")
    known = models.list_models(module=models)
    if name not in known:
        raise UnknownNameError("torchvision model", name, known)
    if channels != 3:
        raise ModelError(f"torchvision's models take 3 channels, not {channels}; use a model of your own or timm:NAME.")
    return _call(f"torchvision:{name}", lambda: models.get_model(name, weights=None, num_classes=classes))


def from_timm(name: str, classes: int, channels: int) -> nn.Module:
    """Build a timm model with fresh weights."""
    timm = _package("timm", "timm")
    if not timm.is_model(name):
        raise UnknownNameError("timm model", name, timm.list_models())
    return _call(
        f"timm:{name}", lambda: timm.create_model(name, pretrained=False, num_classes=classes, in_chans=channels)
    )


def from_callable(name: str, classes: int) -> nn.Module:
    """Call the user's own function or class, with ``classes`` or ``num_classes`` if it takes it.

    Modules in the current directory are found.
    """
    return _module_of(name, call_function(name, ModelError, lambda function: _class_argument(function, classes)))


def _package(module: str, package: str) -> Any:
    """Import a package of networks, also if its compiled part does not match torch; networks do not need that part.

    A wheel of torchvision is for one build of torch, mostly one for CUDA. With another build, the import of torchvision
    (and of timm) fails, because operators of detection are unknown. They are then declared.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        install, missing = keeping_torch('pip install "snugfit[vision]"'), (error.name or package).partition(".")[0]
        raise ModelError(f"{missing} is not installed; install it with: {install}") from error
    except RuntimeError as error:
        if f"torchvision::{_DETECTION[0]} does not exist" not in str(error):
            raise ModelError(f"{package} cannot be imported: {reason_of(error)}.") from error
    _declare_detection()
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        raise ModelError(f"{package} does not match torch {torch.__version__}: {reason_of(error)}.") from error


@cache
def _declare_detection() -> torch.library.Library:
    """Declare torchvision's operators, without implementations, as long as the returned library lives."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _DETECTION:
        signature = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(signature)
    return library


def _call(label: str, function: Callable[[], Any]) -> nn.Module:
    return _module_of(label, attempt(label, function, ModelError))


def _module_of(label: str, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ModelError(f"{label} returned {type(model).__name__}, not a torch.nn.Module.")
    return model


def _class_argument(function: Callable[..., Any], classes: int) -> dict[str, int]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return next(({name: classes} for name in ("classes", "num_classes") if name in parameters), {})
