"""What is worth asking in a process of its own where nothing fits, and the smallest budget that a plan would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from snugfit._core.registry import strategy_class
from snugfit._core.request import OWN, Request
from snugfit._engine.builder import make_strategies
from snugfit._engine.history import past_runs
from snugfit._engine.planning import Planned
from snugfit._planner import smallest_budget_of


def requests_apart(planned: Planned) -> list[Request]:
    """Requests whose answers do not depend on what the measurements of this plan left in memory, or that need less.

    Every strategy that was considered alone, where there were several; then those settings of it that the user left
    open at their leanest.

    Args:
        planned: a plan in which nothing fits.
    """
    request = planned.assembly.request
    if OWN in (request.model.model, request.data.data):
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
    """Smallest memory budget in bytes in which a plan's strategies propose anything, by what was measured for it."""
    request = planned.assembly.request
    considered = make_strategies(request)
    runs = past_runs(request.machine, planned.plan.hardware)
    return smallest_budget_of([*considered.strategies, *considered.standby], planned.plan, planned.profile, runs)
