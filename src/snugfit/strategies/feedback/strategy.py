"""The ``feedback`` strategy: the whole network in memory, trained without backpropagation through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from snugfit._chain import Chain
from snugfit._core.hardware import Hardware
from snugfit._core.profile import UnitStats
from snugfit._core.workload import Workload
from snugfit._training.task import needs_classes
from snugfit.errors import ModelError
from snugfit.local.single_layer import SingleLayer
from snugfit.strategies.feedback.config import FeedbackOptions
from snugfit.strategies.feedback.trainers import TRAINERS
from snugfit.strategies.full_network import FullNetwork, MakeTrainer


@dataclass(frozen=True)
class Feedback(FeedbackOptions, FullNetwork):
    """The rules that LLS is compared with (its Table 2): DFA, DRTP and PEPITA."""

    name: ClassVar[str] = "feedback"
    exact: ClassVar[bool] = False
    probe: ClassVar[str] = "feedback"

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why the model is unsupported: PEPITA requires single layers and exact differences."""
        reasons = needs_classes(workload) + chain.bypassed_hooks()
        if reasons or self.feedback_rule != "pepita":
            return reasons
        if workload.precision == "bfloat16":
            reasons.append("pepita compares two nearly equal passes, which bfloat16 cannot distinguish")
        for unit in chain.all_units:
            try:
                part = SingleLayer.of(unit)
            except ModelError as error:
                reasons.append(f"pepita: {error}")
                continue
            if unit is chain.head and not part.ends:
                reasons.append(f"pepita: the network must end in the weights of unit {unit.name}, whose error is known")
        return reasons

    def make_trainer(self, units: Sequence[UnitStats]) -> MakeTrainer:
        """Trainers by the rule."""
        return TRAINERS[self.feedback_rule]
