"""Rebuild the exit that a blockwise run chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit.local.assignment import Layout


def exit_model(chain: Chain, structure: dict[str, Any], classes: int, state: Mapping[str, Tensor]) -> nn.Module:
    """Build the units up to the exit, with its local loss as classifier; the full network without an exit.

    Args:
        chain: the full network, without weights.
        structure: ``local_loss`` and the index of the ``exit``.
        classes: number of classes.
        state: saved tensors by name, of any shapes.
    """
    if not structure:
        return chain.to_module()
    exit_unit = structure["exit"]
    if not isinstance(exit_unit, int) or exit_unit < 0:
        raise ValueError(f"the exit must be the number of a unit, not {exit_unit!r:.40}")
    return Layout.of(chain, structure["local_loss"], classes).exit_model(exit_unit)
