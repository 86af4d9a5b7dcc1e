"""The strategy ``elastic``, described without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from snugfit._core.option_groups import BaseRequest
from snugfit._core.options import Count, ImportanceMetric, Range
from snugfit._core.record import Record
from snugfit._core.strategy_config import StrategyConfig, present
from snugfit.errors import UsageError
from snugfit.strategies.micro_batch import AccumulationOptions

ElasticScheme = Literal["elastic", "full", "head", "bn+bias", "prunetrain"]


@dataclass(frozen=True)
class ElasticOptions(AccumulationOptions):
    """How tensors are selected.

    Attributes:
        scheme: tensors to train: elastic (the default: the most important ones, selected again during training), full
            (all), head (the classifier), bn+bias (norms, biases, classifier) or prunetrain (all, while channels are
            removed).
        importance: measure by which ``elastic`` ranks tensors: contribution (decrease of the loss by an update), or
            for comparison, gradient or weight (sums of magnitudes).
        interval: epochs between two selections of ``elastic``, or between two prunings of ``prunetrain``; a shorter
            interval follows training more closely but ranks more often.
        importance_batch: images for ranking in ``elastic``, drawn again for every selection; more images estimate
            importance more precisely but take longer.
        lean: keep no activations for frozen tensors of ``elastic``, which saves memory (off: torch's own operators).
        lasso: share of the group lasso of ``prunetrain`` in the loss at the start.
    """

    scheme: ElasticScheme | None = None
    importance: ImportanceMetric = "contribution"
    interval: Count = 3
    importance_batch: Count = 4
    lean: bool = True
    lasso: Annotated[float, Range(least=0, below=1)] = 0.2


_ACCURACY = {
    "full": "All tensors train, and gradients are exact.",
    "prunetrain": "Its gradients are exact, but channels are removed while it trains, so accuracy may differ.",
    "elastic": "Its gradients are exact, but only the most important tensors train, so accuracy may differ.",
}


class Config(StrategyConfig):
    """Trains the currently most important tensors, within a fraction of the time of a full step."""

    name = "elastic"
    implementation = "snugfit.strategies.elastic.strategy:Elastic"
    options = ElasticOptions
    schemes = get_args(ElasticScheme)
    order = 40
    accuracy = _ACCURACY["elastic"]
    keeps_time_ratio = True
    trains_fresh = True
    fine_tunes = True
    no_averaging = "which averages weights over all steps, but the selection of tensors changes"
    rebuild = "snugfit.strategies.elastic.pruning:with_saved_widths"

    def accuracy_with(self, settings: Mapping[str, Any]) -> str:
        """See the base class; what trains depends on the scheme."""
        return _ACCURACY.get(settings.get("scheme", "elastic"), "Only some tensors train, so accuracy may differ.")

    def check(self, request: BaseRequest) -> None:
        """As in the base class; also, only the scheme ``elastic`` keeps a time ratio."""
        scheme = getattr(request.strategy, "scheme", None)
        if request.budget.time_ratio is not None and scheme not in (None, "elastic"):
            raise UsageError(
                f"--time-ratio applies to --scheme elastic, not to --scheme {scheme}; leave one of them out."
            )
        super().check(request)

    def contradiction(self, request: BaseRequest) -> str | None:
        """Channels are removed from optimizer state, too."""
        if getattr(request.strategy, "scheme", None) != "prunetrain" or request.training.optimizer_state != "int8":
            return None
        return (
            "--optimizer-state int8 has scales for groups of weights, which cannot follow removed channels; use "
            "bfloat16, or another --scheme"
        )

    def terms(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The scheme, and rho."""
        scheme, ratio = settings.get("scheme", "elastic"), settings.get("time_ratio")
        return present({f"scheme {scheme}": scheme != "elastic", f"rho {ratio or 0:g}": ratio is not None})

    def structure(self, record: Record) -> dict[str, Any]:
        """Whether channels were removed."""
        return {"pruned": True} if record.settings.get("scheme") == "prunetrain" else {}
