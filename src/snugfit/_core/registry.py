"""The strategies by name. A new strategy is one line here."""

from __future__ import annotations

import importlib
from typing import Any

from snugfit.errors import UnknownNameError

STRATEGIES: dict[str, str] = {
    "backprop": "snugfit.strategies.backprop:Backprop",
    "checkpoint": "snugfit.strategies.checkpoint:Checkpoint",
    "blockwise": "snugfit.strategies.blockwise:Blockwise",
    "elastic": "snugfit.strategies.elastic:Elastic",
    "sidenet": "snugfit.strategies.sidenet:Sidenet",
    "tiled": "snugfit.strategies.tiled:Tiled",
    "feedback": "snugfit.strategies.feedback:Feedback",
}

NAMED_ONLY = frozenset({"feedback"})
"""Strategies that have to be named: those that are there to compare with."""

TILED = frozenset({"tiled"})
"""Strategies over several devices. On one device they save memory alone, take long to plan, and are a last resort."""

TIMED = frozenset({"elastic"})
"""Strategies that answer to a time ratio: ``auto`` considers them, and them alone, where there is one."""

TRANSFER = frozenset({"sidenet"})
"""Strategies that keep what a network knows and add to it: ``auto`` considers them where weights are given."""


def strategy_class(name: str) -> Any:
    """Return the strategy's dataclass.

    Raises:
        UnknownNameError: there is no strategy of that name.
    """
    if name not in STRATEGIES:
        raise UnknownNameError("strategy", name, STRATEGIES)
    module, _, attribute = STRATEGIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
