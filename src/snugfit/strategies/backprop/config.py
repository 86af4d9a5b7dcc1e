"""The strategy ``backprop``, described without torch."""

from collections.abc import Mapping
from typing import Any

from snugfit._core.option_groups import BaseRequest
from snugfit._core.strategy_config import StrategyConfig, present
from snugfit.strategies.micro_batch import BatchNormOptions

WHOLE_BATCH = "snugfit.strategies.backprop.whole_batch"
"""The module with steps on a whole batch."""
WHOLE_BATCH_PROBE = "network:exact"
"""Name of the probe of such a step; its batch size is the number of images of a tile."""


class Config(StrategyConfig):
    """Plain backpropagation."""

    name = "backprop"
    implementation = "snugfit.strategies.backprop.strategy:Backprop"
    options = BatchNormOptions
    order = 10
    exact = True
    trains_fresh = True
    expected_loss = 0
    activations = ("int8", "int4")
    rounds_weights = True
    whole_loss = True
    normalises_batches = True

    def modules(self, request: BaseRequest) -> tuple[str, ...]:
        """The steps on whole batches, if batch norms are to normalise by them."""
        whole = getattr(request.strategy, "batch_norm", "micro") == "exact"
        return (WHOLE_BATCH,) if whole else ()

    def terms(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Whose statistics batch norms use, if not those of a micro-batch."""
        whole = bool(settings.get("whole_batch")) and int(settings.get("micro_batches", 1)) > 1
        return present({"norms by the whole batch": whole})
