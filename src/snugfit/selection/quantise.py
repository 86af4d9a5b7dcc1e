"""Seconds as whole steps of a budget, rounded upward (ElasticTrainer decision 3; equation 8 rounds down).

Rounded upward, whatever fits in steps also fits in seconds. The ratios are exact, so this holds to the last bit; with
floats a selection within the budget could exceed it by a rounding error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from snugfit.selection.checks import Floats, Integers
from snugfit.selection.cost_model import exact_passing


@dataclass(frozen=True)
class Steps:
    """Times in steps of ``budget / resolution`` seconds.

    Times that cannot fit count ``resolution + 1`` steps, which keeps sums small.

    Attributes:
        update: steps of each tensor's update, (N,).
        first: steps of each tensor's update and of the gradient's way to it, rounded up together, (N,): the cost of
            selecting this tensor as the earliest. One rounding makes ``least_seconds`` a sufficient budget.
        passing: steps of the gradient's way to each tensor alone, (N,).
        full: steps of training everything, before that limit.
        resolution: steps of the budget.
    """

    update: Integers
    first: Integers
    passing: Integers
    full: int
    resolution: int


def quantise(t_dw: Floats, t_dy: Floats, budget_seconds: float, resolution: int) -> Steps:
    """Express ``t_dw`` and ``t_dy`` (N,), checked seconds, in steps of ``budget_seconds / resolution``, upward.

    A budget of 0 allows only updates that take no time.
    """
    ratio = Fraction(resolution) / Fraction(budget_seconds) if budget_seconds > 0 else None

    def up(seconds: Fraction) -> int:
        if ratio is None:
            return resolution + 1 if seconds else 0
        return math.ceil(seconds * ratio)

    def limited(times: list[Fraction]) -> Integers:
        return np.array([min(up(time), resolution + 1) for time in times], np.int64)

    updates, passing = [Fraction(time) for time in t_dw], exact_passing(t_dy)
    first = [update + way for update, way in zip(updates, passing, strict=True)]
    full = sum(up(update) for update in updates) + (up(passing[0]) if passing else 0)
    return Steps(limited(updates), limited(first), limited(passing), full, resolution)
