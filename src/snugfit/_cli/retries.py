"""If nothing fits: plan again in fresh processes, and find the smallest memory budget that works.

Memory that refused measurements leave behind counts to the budget. So each strategy is planned again alone, and then
with the leanest of those settings that the user did not set (``snugfit._engine.retries``). If nothing fits either,
the leanest requests are measured in larger budgets.

A measurement in one budget gives only an estimate of the smallest: in a smaller budget other batch sizes are measured,
which leave other kernels in memory. VGG-8 in bfloat16 had 24.1 MB in use after profiling in 91 MB, and 27.9 in 83 MB,
which 91 MB had named. So the budget that an error names was tried itself, as was the one ``LESS`` below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from snugfit._cli.output import explain, note
from snugfit._cli.plan_cache import PlanCache
from snugfit._core.amounts import parse_bytes
from snugfit._core.explanation import explanation_of
from snugfit._core.plan import Plan, ranked
from snugfit._core.request import Request
from snugfit._quantities import format_bytes
from snugfit.errors import InfeasibleBudgetError

MB = 10**6
HOPELESS = 2
"""A strategy that is expected to need more than this many times the budget is not planned alone. The largest ratio seen
of a strategy that then fitted was 1.65: memory left by earlier measurements is part of what it is expected to need."""
MOST_OF_MACHINE = 0.7
"""Largest share of the machine's memory to try in the search of the smallest budget."""
STEPS = (1.0, 1.3, 1.7)
"""Budgets to try until one works, as multiples of the expected one."""
LESS = 3
"""MB below the smallest budget that are known not to work."""
Answers = list[tuple[Request, dict[str, Any]]]
"""Requests, each with the answer of a process."""
Planner = Callable[..., dict[str, Any]]
"""Plans a request in a fresh process; its answer says if it is ``infeasible``, and with ``smallest=True`` the smallest
budget by its measurements."""
Try = Callable[[int], "int | None"]
"""Plans with a budget in MB in a fresh process: the smallest budget by its measurements, or None if nothing fits."""


def plan_again(request: Request, first: dict[str, Any], plan: Planner) -> dict[str, Any]:
    """A plan from fresh processes, or the error with the smallest budget that works.

    ``first`` is the answer of the first process. The ``request`` of the result is that of the chosen candidate, if a
    request other than the first fits.
    """
    if not first.get("infeasible") or request.budget.memory is None:
        return first
    answers: Answers = []
    for each in map(Request.from_json, first.get("retries", ())):
        if _expected(first, each.strategy.strategy) > HOPELESS * parse_bytes(request.budget.memory):
            answers.append((each, first))
        elif not any(_fits(found) for other, found in answers if other.strategy.strategy == each.strategy.strategy):
            note(f"nothing fits yet; planning {_described(each, request)} in a process of its own")
            answers.append((each, plan(each)))
    if any(_fits(found) for _, found in answers):
        return _merged(first, answers)
    return _with_smallest_budget(request, first, answers or [(request, first)], plan)


def _fits(found: dict[str, Any]) -> bool:
    """Whether anything fits in an answer."""
    return not found["infeasible"]


def _described(narrowed: Request, request: Request) -> str:
    """A strategy, and the settings that were chosen for it."""
    before, now = vars(request.strategy), vars(narrowed.strategy)
    settings = [f"{key.replace('_', '-')} {now[key]}" for key in now if key != "strategy" and now[key] != before[key]]
    return narrowed.strategy.strategy + (f" with {', '.join(settings)}" if settings else "")


def _merged(first: dict[str, Any], answers: Answers) -> dict[str, Any]:
    """One plan of what fits in fresh processes, best first, and then of what does not fit."""
    feasible = [(each, found, Plan.from_json(found["plan"])) for each, found in answers if _fits(found)]
    fitting = {each.strategy.strategy for each, _, _ in feasible}
    plan = Plan.from_json(first["plan"])
    others = [candidate for candidate in plan.candidates if candidate.strategy not in fitting]
    best = ranked([*(each for _, _, one in feasible for each in one.candidates if each.feasible), *others], plan.aim)
    request, _, chosen = next(each for each in feasible if best[0] in each[2].candidates)
    plan = replace(plan, candidates=best, chosen=0, command=chosen.command)
    return {
        "plan": replace(plan, explanation=explanation_of(plan)).to_json(),
        "infeasible": None,
        "comparison": [trial for _, found, _ in feasible for trial in found["comparison"]],
        "request": request.to_json(),
    }


def _with_smallest_budget(request: Request, first: dict[str, Any], refused: Answers, plan: Planner) -> dict[str, Any]:
    """The error that names the smallest budget that works."""
    anywhere = replace(request, budget=replace(request.budget, memory=None), machine=replace(request.machine, out=None))
    cache = PlanCache(anywhere, "smallest")
    known, least = cache.find(), parse_bytes(str(request.budget.memory)) + MB
    if known is None or known["bytes"] < least:
        known = _smallest(refused, least, plan)
        if known is None:
            return first
        cache.keep(known)
    return _refusal(request, first, known["strategy"], known["bytes"])


def _smallest(refused: Answers, least: int, plan: Planner) -> dict[str, Any] | None:
    """The smallest budget, and the strategy that fits it; None if nothing fits any budget that was tried."""
    best: dict[str, Any] | None = None
    most = int(MOST_OF_MACHINE * refused[0][1]["plan"]["hardware"]["memory_bytes"])
    expected = [(_expected(found, each.strategy.strategy), each) for each, found in refused]
    for size, each in sorted((pair for pair in expected if pair[0]), key=lambda pair: pair[0]):
        if best is not None and size >= best["bytes"]:
            break
        found = _search(each, size, range(least, most), plan, best)
        if found is not None and (best is None or found["bytes"] < best["bytes"]):
            best = found
    return best


def _expected(found: dict[str, Any], strategy: str) -> int:
    """The budget in bytes that a strategy (any if ``auto``) is expected to need; 0 if no budget would work."""
    candidates = [each for each in found["plan"]["candidates"] if strategy in ("auto", each["strategy"])]
    return min((each["smallest_bytes"] for each in candidates if each["smallest_bytes"]), default=0)


def _search(
    request: Request, expected: int, sizes: range, plan: Planner, best: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The smallest of these budgets that a request fits, and the strategy; None if it fits none that was tried."""
    strategy = request.strategy.strategy

    def attempt(size: int) -> int | None:
        nonlocal strategy
        note(f"measuring {request.strategy.strategy} in {size}.0 MB, to find the smallest budget that works")
        found = plan(replace(request, budget=replace(request.budget, memory=f"{size}MB")), smallest=True)
        if not found.get("smallest"):
            return None
        strategy = found["plan"]["candidates"][found["plan"]["chosen"]]["strategy"]
        return int(found["smallest"] // MB)

    enough = None if best is None else best["bytes"] // MB
    size = smallest_that_fits(attempt, -(-expected // MB), sizes.start // MB - 1, sizes.stop // MB, enough)
    return None if size is None else {"bytes": size * MB, "strategy": strategy}


def _refusal(request: Request, first: dict[str, Any], strategy: str, smallest: int) -> dict[str, Any]:
    """The first answer, with an error in which that strategy needs that much and no other one less."""
    plan, budget = first["plan"], parse_bytes(str(request.budget.memory))
    candidates = [dict(each) for each in plan["candidates"]]
    for each in candidates:
        if each["smallest_bytes"] and each["strategy"] == strategy:
            each |= {"smallest_bytes": smallest, "reasons": [f"needs {format_bytes(smallest)}"]}
        elif each["smallest_bytes"]:
            each["smallest_bytes"] = max(each["smallest_bytes"], smallest)
    work = f"{plan['workload']['model']} on {plan['workload']['data']}"
    error = InfeasibleBudgetError(
        f"{work} does not fit a budget of {format_bytes(budget)} of memory.",
        closest=f"{strategy} (needs {format_bytes(smallest)})",
        lacking_bytes=smallest - budget,
        smallest_bytes=smallest,
    )
    return {**first, "plan": {**plan, "candidates": candidates}, "infeasible": explain(error).to_json()}


def smallest_that_fits(attempt: Try, expected: int, refused: int, most: int, enough: int | None = None) -> int | None:
    """The smallest budget, in MB, that works when tried, while ``LESS`` below it does not; None if none works.

    The search begins at the ``expected`` budget, between the largest one that is known to be ``refused`` and the
    ``most`` to try. A larger budget than ``enough`` is returned as soon as it is found, and not narrowed down.
    """
    refusals = {refused}
    for step in STEPS:
        high = max(int(expected * step), refused + 1)
        if high > most:
            return None
        estimate = attempt(high)
        if estimate is not None:
            break
        refusals.add(high)
    else:
        return None
    return _narrowed(attempt, max(high, estimate), max(estimate, refused + 1), refusals, enough)


def _narrowed(attempt: Try, high: int, estimate: int, refusals: set[int], enough: int | None) -> int:
    """Lower a budget that works until ``LESS`` below it is refused.

    The last estimate is tried first; after a refusal a little more, and then twice as much more.
    """
    step, refused = LESS, min(refusals)
    while high - LESS > refused and high - LESS not in refusals:
        if enough is not None and estimate > enough:
            return estimate
        low = max(each for each in refusals if each < high)
        size = estimate if low < estimate < high else high - LESS
        found = attempt(size)
        if found is None:
            refusals.add(size)
            estimate, step = size + step, 2 * step
        else:
            high, estimate = max(size, found), max(found, refused + 1)
    return high
