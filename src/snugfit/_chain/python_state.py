"""What passes of a module change besides tensors, so that a second one in a step would differ."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
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
