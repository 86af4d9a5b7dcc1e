"""The smallest memory budget that would do, by what was measured in a larger one. Arithmetic on profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from snugfit._core.plan import Plan
from snugfit._core.profile import Profile
from snugfit._core.strategy import Strategy
from snugfit._planner.calibration import PastRun, correction
from snugfit._planner.search import candidates_of

MB = 10**6
DRIFT_BYTES = 1 * MB
"""How far the memory in use before training differs between two processes: what is told must do in the next one."""


def smallest_budget_of(
    strategies: Sequence[Strategy], plan: Plan, profile: Profile, runs: Sequence[PastRun]
) -> int | None:
    """Smallest memory budget in bytes, in whole MB, in which one of the strategies proposes what fits.

    Args:
        strategies: as they were asked.
        plan: their answer in a budget that holds one of them.
        profile: what was measured for it.
        runs: past runs, by which predictions are corrected.

    Returns:
        None where no strategy fits the plan's budget, or where that bounds no memory.
    """
    most = plan.budget.memory_bytes
    if most is None:
        return None
    sizes = [_smallest(each, plan, profile, runs, most // MB) for each in strategies]
    return min((size * MB + DRIFT_BYTES for size in sizes if size is not None), default=None)


def _smallest(strategy: Strategy, plan: Plan, profile: Profile, runs: Sequence[PastRun], most: int) -> int | None:
    """Fewest MB up to ``most``, by bisection; None where that does not do either."""
    learnt = correction(runs, strategy.name, plan.workload)

    def fits(size: int) -> bool:
        budget = replace(plan.budget, memory=size * MB)
        found = candidates_of(strategy, plan.workload, profile, plan.hardware, budget, learnt)
        return any(candidate.feasible for candidate in found)

    known = {each.strategy for each in plan.candidates if each.feasible}
    if strategy.name not in known or not fits(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
