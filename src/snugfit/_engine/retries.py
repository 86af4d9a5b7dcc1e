"""Requests to plan again in fresh processes, and the smallest budget by what was measured.

``snugfit._cli.retries`` starts those processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from snugfit._core.options import ANY_STRATEGY, AUTO
from snugfit._core.plan import Plan
from snugfit._core.profile import Profile
from snugfit._core.registry import find_config, strategies, strategy_class
from snugfit._core.request import Request
from snugfit._engine.builder import make_strategies, optimizer_of
from snugfit._engine.history import past_runs
from snugfit._engine.planning import Planned
from snugfit._planner import PastRun
from snugfit._planner.calibration import correction
from snugfit._planner.candidates import candidates_of
from snugfit._quantities import MB
from snugfit._training.strategy import Strategy

NEXT_PROCESS_BYTES = 1 * MB
"""Added to the smallest budget, because the memory in use before training differs between two processes. A strategy's
shortfall adds more (``DRIFT_BYTES``); this budget is tried by the command line before it names it."""


def retry_requests(planned: Planned) -> list[Request]:
    """Requests to plan again in fresh processes, because memory that other measurements left counts to a budget.

    If something fits: where strategies were measured together, each refused one that may fit alone; and if accuracy is
    the aim, and what fits is not exact, each exact one alone.

    If nothing fits, for each considered strategy: the strategy alone, unless the request already names it; then each of
    its leaner settings, for options that the user left open. Then exact strategies with optimizer state in 8 bits, if
    there is state and the user left its type open; those of them that can keep weights in bfloat16, with both, if the
    user left that type open, too; and at last local losses with state in 8 bits. The others train so few weights that
    their state is small.
    """
    return [each for each in _retries(planned) if find_config(each.strategy.strategy).contradiction(each) is None]


def _retries(planned: Planned) -> list[Request]:
    """The same, with those whose strategy refuses their other options."""
    request = planned.assembly.request
    if request.from_python:
        return []
    if planned.plan.choice is not None:
        alone, exact = [request.with_strategy(name) for name in planned.may_fit_alone], _exact_alone(planned)
        return [*alone, *(each for each in exact if each not in alone)]
    short = [each.strategy for each in planned.plan.candidates if each.considered and each.smallest_bytes is not None]
    named = [request.with_strategy(name) for name in dict.fromkeys(short)]
    least = [_with_least_state(each) for each in named if _is_open(each)]
    exact = [each for each in least if find_config(each.strategy.strategy).exact]
    local = [one for each in least if each not in exact for one in (each, *_leaner(each))]
    rounded = [
        replace(each, training=replace(each.training, weight_dtype="bfloat16"))
        for each in exact
        if _rounds_weights(each)
    ]
    retries = [each for alone in named for each in (alone, *_leaner(alone)) if each != request]
    small, smaller = ([each for each in those if each not in (*named, *retries)] for those in (exact, local))
    return [*retries, *small, *rounded, *smaller]


def _exact_alone(planned: Planned) -> list[Request]:
    """Requests for exact gradients, each in a process of its own, if accuracy is the aim and what fits lacks them.

    They are the refused exact strategies, but for last resorts; and what ``--batch-norm exact`` serves, if these are
    refused or their batch norms would normalise too few images, and the user did not name ``--batch-norm``.
    """
    plan, request = planned.plan, planned.assembly.request
    choice = plan.choice
    if plan.aim != "accuracy" or choice is None or not request.budget.limits_memory:
        return []
    if choice.fine_tunes or (choice.exact and not choice.normalises_few):
        return []
    names: list[str] = []
    if request.strategy.strategy == AUTO and not choice.exact:
        usual = {each.name for each in make_strategies(request).strategies}
        names = [each.strategy for each in plan.candidates if each.exact and each.smallest_bytes]
        names = [name for name in dict.fromkeys(names) if name in usual]
    alone = [] if planned.apart else [request.with_strategy(name) for name in names]
    few = any(each.feasible and each.normalises_few for each in plan.candidates)
    tracks = any(unit.tracks for unit in planned.profile.units)
    is_open = getattr(request.strategy, "batch_norm", None) is None
    whole = [*_with_whole_batches(request)] if is_open and (few or (names and tracks)) else []
    return [*alone, *whole]


def _with_whole_batches(request: Request) -> Iterator[Request]:
    """The strategies, of those asked for, whose batch norms can normalise all images of a step, with that setting."""
    for name, config in strategies().items():
        if config.normalises_batches and request.strategy.strategy in (*ANY_STRATEGY, name):
            settings: dict[str, Any] = {"strategy": name, "batch_norm": "exact"}
            yield replace(request, strategy=replace(request.strategy, **settings))


def _is_open(request: Request) -> bool:
    """Whether the planner may choose the type of the optimizer state of a strategy for which that matters."""
    if not find_config(request.strategy.strategy).rounds_state:
        return False
    return request.training.optimizer_state is None and not optimizer_of(request).averages


def _with_least_state(request: Request) -> Request:
    """The request with optimizer state in 8 bits; unchanged if the optimizer has no state to round."""
    if not replace(optimizer_of(request), state="int8").rounds:
        return request
    return replace(request, training=replace(request.training, optimizer_state="int8"))


def _rounds_weights(request: Request) -> bool:
    """Whether the planner may choose the type of weights, and the strategy can keep them in bfloat16."""
    training = request.training
    open_type = training.weight_dtype is None and training.ema is None
    return open_type and find_config(request.strategy.strategy).rounds_weights


def _leaner(request: Request) -> Iterator[Request]:
    """A named strategy with each of its leaner settings."""
    leaner = getattr(strategy_class(request.strategy.strategy), "leaner", None)
    for settings in leaner(request.strategy) if leaner is not None else ():
        yield replace(request, strategy=replace(request.strategy, **settings))


def smallest_fitting(planned: Planned) -> int | None:
    """Smallest memory budget in bytes in which a plan's strategies propose an instance, by its measurements.

    It has to be enough in the next process, which finds them in the cache if there is one.
    """
    request = planned.assembly.request
    profile = planned.profile if request.machine.profile_cache == "off" else planned.next_profile
    considered = make_strategies(request)
    runs = past_runs(request.machine, planned.plan.hardware)
    return smallest_budget_of([*considered.strategies, *considered.standby], planned.plan, profile, runs)


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
    return min((size * MB + NEXT_PROCESS_BYTES for size in sizes if size is not None), default=None)


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
