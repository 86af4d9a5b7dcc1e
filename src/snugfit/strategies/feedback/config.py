"""The strategy ``feedback``, described without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snugfit._core.option_groups import BaseRequest
from snugfit._core.strategy_config import StrategyConfig
from snugfit.strategies.micro_batch import AccumulationOptions

FeedbackRule = Literal["dfa", "drtp", "pepita"]


@dataclass(frozen=True)
class FeedbackOptions(AccumulationOptions):
    """The feedback rule.

    Attributes:
        feedback_rule: learning rule of ``feedback``: dfa, drtp or pepita.
    """

    feedback_rule: FeedbackRule = "dfa"


class Config(StrategyConfig):
    """The rules that LLS is compared with (its Table 2)."""

    name = "feedback"
    implementation = "snugfit.strategies.feedback.strategy:Feedback"
    options = FeedbackOptions
    order = 70
    only_named = True

    def _unsupported(self, request: BaseRequest) -> str | None:
        smoothing = request.training.label_smoothing  # its rules project the error of unsmoothed targets
        return f"--label-smoothing {smoothing:g}" if smoothing else super()._unsupported(request)
