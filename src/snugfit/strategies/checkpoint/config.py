"""The strategy ``checkpoint``, described without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snugfit._core.strategy_config import StrategyConfig, present
from snugfit.strategies.micro_batch import AccumulationOptions


class Config(StrategyConfig):
    """Backpropagation that recomputes as little as the memory budget allows."""

    name = "checkpoint"
    implementation = "snugfit.strategies.checkpoint.strategy:Checkpoint"
    options = AccumulationOptions
    order = 20
    exact = True
    expected_loss = 0

    def terms(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The units that run again."""
        recomputation = settings.get("recomputation", "")
        return present({f"recomputes {recomputation}": "(" in recomputation})
