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
FLAG = "--batch-norm exact"


class Config(StrategyConfig):
    """Plain backpropagation."""

    name = "backprop"
    implementation = "snugfit.strategies.backprop.strategy:Backprop"
    options = BatchNormOptions
    order = 10
    exact = True
    rounds_state = True
    trains_fresh = True
    expected_loss = 0
    activations = ("int8", "int4")
    rounds_weights = True
    scales_loss = True
    whole_loss = True
    normalises_batches = True

    def modules(self, request: BaseRequest) -> tuple[str, ...]:
        """The steps on whole batches, if batch norms are to normalise by them."""
        return (WHOLE_BATCH,) if _normalises_whole(request) else ()

    def contradiction(self, request: BaseRequest) -> str | None:
        """Steps on whole batches neither average, nor round, nor hold gradients to scale the loss."""
        training = request.training
        if not _normalises_whole(request):
            return None
        if training.optimizer == "schedulefree":
            return f"{FLAG} cannot average weights; use --optimizer sgd or adamw"
        if training.activations != "exact":
            return f"{FLAG} does not support --activations {training.activations}"
        for flag, value, refused in (
            ("--weight-dtype", training.weight_dtype, "bfloat16"),
            ("--precision", training.precision, "float16"),
        ):
            if value == refused:
                return f"{FLAG} does not support {flag} {value}"
        return None

    def terms(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Whose statistics batch norms use, if not those of a micro-batch."""
        whole = bool(settings.get("whole_batch")) and int(settings.get("micro_batches", 1)) > 1
        return present({"norms by the whole batch": whole})


def _normalises_whole(request: BaseRequest) -> bool:
    return getattr(request.strategy, "batch_norm", "micro") == "exact"
