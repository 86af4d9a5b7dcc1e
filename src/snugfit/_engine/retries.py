"""If nothing fits: requests to plan again in fresh processes, and the smallest budget by what was measured.

``snugfit._cli.retries`` starts those processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from snugfit._core.option_groups import FROM_PYTHON
from snugfit._core.plan import Plan
from snugfit._core.profile import Profile
from snugfit._core.registry import strategy_class
from snugfit._core.request import Request
from snugfit._engine.builder import make_strategies
from snugfit._engine.history import past_runs
from snugfit._engine.planning import Planned
from snugfit._planner import PastRun
from snugfit._planner.calibration import correction
from snugfit._planner.search import candidates_of
from snugfit._training.strategy import Strategy

MB = 10**6
DRIFT_BYTES = 1 * MB
"""Difference of the memory in use before training between two processes; added to the smallest budget."""


def retry_requests(planned: Planned) -> list[Request]:
    """Requests to plan again in fresh processes, for a plan in which nothing fits.

    For each considered strategy: the strategy alone, unless the request already names it; then each of its leaner
    settings, for options that the user left open.
    """
    request = planned.assembly.request
    if FROM_PYTHON in (request.model.model, request.data.data):
        return []
    short = [each.strategy for each in planned.plan.candidates if each.considered and each.smallest_bytes is not None]
    return [each for name in dict.fromkeys(short) for each in _of_strategy(request, name)]


def _of_strategy(request: Request, name: str) -> Iterator[Request]:
    options = replace(request.strategy, strategy=name)
    if options != request.strategy:
        yield replace(request, strategy=options)
    leaner = getattr(strategy_class(name), "leaner", None)
    for settings in leaner(request.strategy) if leaner is not None else ():
        yield replace(request, strategy=replace(options, **settings))


def smallest_fitting(planned: Planned) -> int | None:
    """Smallest memory budget in bytes in which a plan's strategies propose an instance, by its measurements."""
    request = planned.assembly.request
    considered = make_strategies(request)
    runs = past_runs(request.machine, planned.plan.hardware)
    return smallest_budget_of([*considered.strategies, *considered.standby], planned.plan, planned.profile, runs)


def smallest_budget_of(
    strategies: Sequence[Strategy], plan: Plan, profile: Profile, runs: Sequence[PastRun]
) -> int | None:
    """Smallest memory budget in bytes, in whole MB, in which one of the strategies proposes what fits.

    Predictions are corrected by past runs. None if no strategy fits the plan's budget, or if that has no memory limit.
    """
    most = plan.budget.memory_bytes
    if most is None:
        return None
    sizes = [_smallest(each, plan, profile, runs, most // MB) for each in strategies]
    return min((size * MB + DRIFT_BYTES for size in sizes if size is not None), default=None)


def _smallest(strategy: Strategy, plan: Plan, profile: Profile, runs: Sequence[PastRun], most: int) -> int | None:
    """Smallest number of MB up to ``most`` that fits, by bisection; None if ``most`` does not fit."""
    factors = correction(runs, strategy.name, plan.workload)

    def fits(size: int) -> bool:
        budget = replace(plan.budget, memory=size * MB)
        found = candidates_of(strategy, plan.workload, profile, plan.hardware, budget, factors)
        return any(candidate.feasible for candidate in found)

    feasible = {each.strategy for each in plan.candidates if each.feasible}
    if strategy.name not in feasible or not fits(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
