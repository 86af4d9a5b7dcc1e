"""The strategy ``backprop``, described without torch."""

from collections.abc import Mapping
from typing import Any

from snugfit._core.strategy_config import StrategyConfig, present
from snugfit.strategies.micro_batch import BatchNormOptions


class Config(StrategyConfig):
    """Plain backpropagation."""

    name = "backprop"
    implementation = "snugfit.strategies.backprop.strategy:Backprop"
    options = BatchNormOptions
    order = 10
    exact = True
    expected_loss = 0
    activations = ("int8", "int4")
    rounds_weights = True
    normalises_batches = True

    def terms(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Whose statistics batch norms use, if not those of a micro-batch."""
        whole = bool(settings.get("whole_batch")) and int(settings.get("micro_batches", 1)) > 1
        return present({"norms by the whole batch": whole})
