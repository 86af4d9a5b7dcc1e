"""What a caller passes from Python besides model and data: functions that no run folder can store."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from snugfit._core.workload import Workload
from snugfit._training.losses import Loss, check_loss
from snugfit._training.own_metrics import Metric, check_metrics
from snugfit._training.own_optimizer import MakeOptimizer
from snugfit.errors import UsageError, reason_of

Schedule = Callable[[int, int], float]
"""From a step, counted from 0, and the number of steps to the share of the peak learning rate."""
FUNCTIONS = {"loss": "a loss", "schedule": "a schedule", "optimizer": "an optimizer"}
"""Options that may be functions from Python, and what each then is."""
_TRIED_STEPS = 100
"""At most; they are spread evenly over a run's, with the first and the last."""


@dataclass(frozen=True)
class OwnParts:
    """Functions that were passed from Python; to resume a run, they are passed again.

    Attributes:
        loss: from logits and labels to the mean loss of a batch.
        schedule: from step and number of steps to the share of the peak learning rate.
        optimizer: from a group of one parameter, with its name, to a torch optimizer of it.
        metrics: measured on validation and test images in the end, and after epochs, by name.
    """

    loss: Loss | None = None
    schedule: Schedule | None = None
    optimizer: MakeOptimizer | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def check(self, workload: Workload, device: torch.device) -> None:
        """Try all but the optimizer on a few values; raises UsageError."""
        check_loss(self.loss, workload, device)
        check_metrics(self.metrics, workload)
        if self.schedule is not None:
            steps = workload.epochs * max(workload.train_count // workload.batch_size, 1)
            for step in _spread(steps):
                factor_of(self.schedule, step, steps)


def _spread(steps: int) -> list[int]:
    """Steps of a run to try, ascending."""
    tried = min(steps, _TRIED_STEPS)
    return [number * (steps - 1) // max(tried - 1, 1) for number in range(tried)]


def factor_of(schedule: Schedule, step: int, steps: int) -> float:
    """The share of the peak learning rate in a step.

    Raises:
        UsageError: the function failed, or returned no finite number of at least 0.
    """
    try:
        factor = float(schedule(step, steps))
    except Exception as error:
        raise UsageError(f"schedule= failed in step {step} of {steps}: {reason_of(error)}.") from error
    if not math.isfinite(factor) or factor < 0:
        raise UsageError(
            f"schedule= returned {factor:.6g} in step {step} of {steps}; return the share of the peak learning rate, a "
            "number of at least 0."
        )
    return factor
