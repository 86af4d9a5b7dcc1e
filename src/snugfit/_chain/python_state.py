"""What passes of a module change besides tensors, so that a second one in a step would differ."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_NO_STATE = {*vars(nn.Module()), "forward"} - {"training"}


def python_state(module: nn.Module) -> object:
    """What the layers of a module hold besides tensors and layers, in a form that can be compared."""

    def compared(value: object) -> int:
        return hash(repr((value, getattr(value, "__dict__", None))))

    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):  # arrays in full
        return [{key: compared(vars(each)[key]) for key in vars(each).keys() - _NO_STATE} for each in module.modules()]


@contextlib.contextmanager
def attributes_kept(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Give all layers of a module their attributes back, in whose place passes in the context may store values.

    Gives the attributes of the module itself.
    """
    kept = [(layer, dict(vars(layer))) for layer in module.modules()]
    try:
        yield kept[0][1]
    finally:
        for layer, attributes in kept:
            for key in vars(layer).keys() - attributes.keys():
                del vars(layer)[key]
            vars(layer).update(attributes)


@contextlib.contextmanager
def restored(module: object) -> Iterator[None]:
    """Give all layers of a module their attributes, buffers and containers of Python back as they were.

    Buffers and attributes that are tensors are copied; containers get back the items that they held. Parameters are not
    copied. Of a function, or anything else that is no module, nothing is restored.
    """
    if not isinstance(module, nn.Module):
        yield
        return
    undo = [_undoing(value) for layer in module.modules() for value in vars(layer).values()]
    undo += [_undoing(buffer) for buffer in module.buffers()]
    try:
        with attributes_kept(module):
            yield
    finally:
        for each in undo:
            each()


def _undoing(value: Any) -> Callable[[], object]:
    """A function that gives a tensor of any shape, or a container, the content that it has now."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference():
        content = value.detach().clone()
        return lambda: None if torch.equal(value, content) else value.detach().copy_(content)
    if isinstance(value, (dict, list, deque, set)):
        items = copy.copy(value)

        def refill() -> None:
            value.clear()
            value.update(items) if isinstance(value, (dict, set)) else value.extend(items)

        return refill
    return lambda: None
