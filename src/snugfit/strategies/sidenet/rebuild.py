"""Rebuild a network with its side network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, fx, nn

from snugfit._chain import Chain
from snugfit.strategies.rebuilding import with_saved_widths
from snugfit.surgery import attach_side_network


def side_network(chain: Chain, structure: dict[str, Any], classes: int, state: Mapping[str, Tensor]) -> nn.Module:
    """The backbone with its saved widths, and the side network if there is one.

    Args:
        chain: the full network, without weights.
        structure: ``pruned`` if channels were removed; ``side_width`` if there is a side network.
        classes: number of classes.
        state: saved tensors by name, in the shapes of the pruned network.
    """
    module = with_saved_widths(chain, structure, classes, state)
    width = structure.get("side_width")
    if not width:
        return module
    return attach_side_network(cast(fx.GraphModule, module), chain.input_shape, width=float(width))
