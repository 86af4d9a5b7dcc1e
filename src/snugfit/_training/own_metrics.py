"""Metrics that were passed from Python: objects like those of torchmetrics, measured on the finished model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from snugfit._core.workload import Workload
from snugfit.errors import SnugfitError, UsageError, reason_of
from snugfit.memory import is_out_of_memory


class Metric(Protocol):
    """What torchmetrics calls a metric."""

    def update(self, outputs: Tensor, targets: Tensor) -> Any:
        """Add logits (B, classes) and labels (B,), or 0 and 1 (B, classes) int64, on the processor."""

    def compute(self) -> Any:
        """A number, or a tensor with one element, for all that was added."""

    def reset(self) -> Any:
        """Forget what was added."""


Values = dict[str, float | None]
"""Value of each metric by name; None if it is not finite."""
_TRIED_ROWS = 64
"""More would take memory with the square of the classes."""


def check_metrics(metrics: Mapping[str, Metric], workload: Workload) -> None:
    """Try metrics on a few random logits.

    Raises:
        UsageError: the task is to detect, or an object is no metric, fails, or gives no number.
    """
    if not metrics:
        return
    if workload.task == "detect":
        raise UsageError("metrics= are given logits and labels; leave them out for --task detect.")
    for name, metric in metrics.items():
        for method in ("update", "compute", "reset"):
            if not callable(getattr(metric, method, None)):
                raise UsageError(
                    f"metrics= has {name!r}, a {type(metric).__name__} without {method}(); give objects with update, "
                    "compute and reset, as torchmetrics has them."
                )
    rows = min(2 * workload.classes, _TRIED_ROWS)
    logits = torch.randn(rows, workload.classes, generator=torch.Generator().manual_seed(0))
    reset(metrics)
    labels = torch.arange(len(logits)) % workload.classes
    update(metrics, logits, F.one_hot(labels, workload.classes) if workload.task == "multi-label" else labels)
    values_of(metrics)
    reset(metrics)


def reset(metrics: Mapping[str, Metric]) -> None:
    """Forget what was added; raises UsageError if a metric fails."""
    _each(metrics, "reset", lambda metric: metric.reset())


def update(metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor) -> None:
    """Add logits (B, classes) and labels (B, ...); raises UsageError if a metric fails."""
    _each(metrics, "update", lambda metric: metric.update(outputs, targets))


def values_of(metrics: Mapping[str, Metric]) -> Values:
    """The metrics of what was added; raises UsageError if one fails, or gives no number."""
    return _each(metrics, "compute", lambda metric: _number(metric.compute()))


def _number(found: Any) -> float | None:
    value = float(found)
    return value if math.isfinite(value) else None


def _each(metrics: Mapping[str, Metric], method: str, call: Callable[[Metric], Any]) -> dict[str, Any]:
    found = {}
    for name, metric in metrics.items():
        try:
            found[name] = call(metric)
        except Exception as error:
            if isinstance(error, SnugfitError) or is_out_of_memory(error):
                raise
            raise UsageError(
                f"the metric {name!r} failed in {method}(): {reason_of(error)}. It takes logits "
                "(B, classes) and labels (B,), or (B, classes) if there are several, and gives one number."
            ) from error
    return found
