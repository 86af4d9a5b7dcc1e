"""Rebuild networks whose channels were removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit.surgery import adopt_widths


def with_saved_widths(chain: Chain, structure: dict[str, Any], classes: int, state: Mapping[str, Tensor]) -> nn.Module:
    """Rebuild the full network; if it was pruned, with layers as wide as the saved tensors.

    Args:
        chain: the full network, without weights.
        structure: ``pruned`` is true if channels were removed.
        classes: number of classes.
        state: saved tensors by name, of any shapes.
    """
    module = chain.to_module()
    if structure.get("pruned"):
        adopt_widths(module, state, chain.input_shape)
    return module
