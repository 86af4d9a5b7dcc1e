"""Plan again in fresh processes where that is better than the first plan. Find the smallest budget that works.

Memory that measurements leave behind counts to the budget. So where strategies were measured in one process, those that
were refused and may fit alone are planned again, each in a process of its own. If nothing fits, every strategy is
planned again with the leanest of those settings that the user did not set (``snugfit._engine.retries``). If nothing
fits with optimizer state in float32, strategies are planned with state in 8 bits, and then with weights in bfloat16 as
well. If nothing fits either, the leanest requests are measured in larger budgets.

A measurement in one budget gives only an estimate of the smallest: in a smaller budget other batch sizes are measured,
which leave other kernels in memory. VGG-8 in bfloat16 had 24.1 MB in use after profiling in 91 MB, and 27.9 in 83 MB,
which 91 MB had named. So the budget that an error names was tried itself, as was the one ``LESS`` below. If a budget is
enough only to the MB, the next one is named, if it was enough too: memory at rest differs between two processes. What
rounds updates less is tried in the same budget, and named if it fits: for a small network, the code of optimizer state
in 8 bits takes more memory than it saves. At last the budget is asked for again, as the next command does, by a
process that finds all of these measurements, or measures again (:func:`_lasting`).

If a budget is refused that is known to be enough, it is planned once more, from measurements that are cached by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from snugfit._cli.output import explain, note
from snugfit._cli.plan_cache import PlanCache
from snugfit._core.amounts import parse_bytes
from snugfit._core.explanation import explanation_of, kept_memory_note
from snugfit._core.option_groups import TrainingOptions
from snugfit._core.options import ANY_STRATEGY
from snugfit._core.plan import Plan, ranked
from snugfit._core.request import Request
from snugfit._core.workload import Workload
from snugfit._quantities import MB, format_bytes
from snugfit.errors import InfeasibleBudgetError

HOPELESS = 2
"""A strategy that is expected to need more than this many times the budget is not planned alone. The largest ratio seen
of a strategy that then fitted was 1.65: memory left by earlier measurements is part of what it is expected to need."""
MOST_OF_MACHINE = 0.7
"""Largest share of the machine's memory to try in the search of the smallest budget."""
SMALL_STATE = 0.7
"""Budget with optimizer state in 8 bits, as a share of that with float32, at which a search begins. For VGG-16 with its
small feature maps it is 0.68, and 0.55 with adamw."""
SMALL_WEIGHTS = 0.8
"""The same for weights in bfloat16, as a share of the budget with float32 and the same state: 0.81 for VGG-16."""
ROUNDED = ("optimizer_state", "weight_dtype")
"""Options of training by which updates are rounded."""
STEPS = (1.0, 1.3, 1.7)
"""Budgets to try until one works, as multiples of the expected one."""
LESS = 3
"""MB below the smallest budget that are known not to work."""
LESS_GROWTH = LESS - 1
"""The same for the growth that a budget of all processes leaves: in another process it may be 1 MB more, because memory
at rest differs by some 100 kB, which may be on both sides of a whole MB."""
CONFIRMATIONS = 3
"""Most budgets that are asked for again, from all measurements of the search, before one is named untried."""
Answers = list[tuple[Request, dict[str, Any]]]
"""Requests, each with the answer of a process."""
Planner = Callable[..., dict[str, Any]]
"""Plans a request in a fresh process; its answer says if it is ``infeasible``, and with ``smallest=True`` the smallest
budget by its measurements, which may be 1 MB above that of the request."""
Try = Callable[[int], "int | None"]
"""Plans with a budget in MB in a fresh process: the smallest budget by its measurements, or None if nothing fits. If it
exceeds the budget, then the budget is enough only to the MB."""


def plan_again(request: Request, first: dict[str, Any], plan: Planner) -> dict[str, Any]:
    """A plan from fresh processes, or the error with the smallest budget that works.

    ``first`` is the answer of the first process. It is the result if something fits and no request that it names under
    ``retries`` fits in a process of its own. The ``request`` of the result is that of the chosen candidate, if a
    request other than the first fits.
    """
    if not request.budget.limits_memory:
        return first
    if _fits(first):
        return _with_others(request, first, plan)
    memory, answers = first["plan"]["budget"]["memory"], Answers()
    for each in map(Request.from_json, first.get("retries", ())):
        plain = replace(request.with_strategy(each.strategy.strategy), model=each.model)  # the worker finds weights
        planned = first.get("apart") and each == plain
        if planned or _expected(first, each) > HOPELESS * memory:
            answers.append((each, first))
        elif not any(_fits(found) and _is_no_worse(other, each) for other, found in answers):
            note(f"nothing fits yet; planning {_described(each, request)} in a process of its own")
            answers.append((each, plan(each)))
    if any(_fits(found) for _, found in answers):
        return _merged(first, answers)
    if all(each.training != request.training for each, _ in answers):
        answers.append((request, first))
    return _with_smallest_budget(request, first, answers, plan)


def _with_others(request: Request, first: dict[str, Any], plan: Planner) -> dict[str, Any]:
    """The first plan, and what else fits in processes of its own."""
    answers = Answers()
    for each in map(Request.from_json, first.get("retries", ())):
        if _expected(first, each) <= HOPELESS * first["plan"]["budget"]["memory"]:
            note(f"planning {_described(each, request)} in a process of its own, where less memory is in use")
            answers.append((each, plan(each)))
    return _merged(first, [(request, first), *answers]) if any(_fits(found) for _, found in answers) else first


def _is_no_worse(one: Request, other: Request) -> bool:
    """Whether the other need not be planned if one fits: it is the same strategy, or rounds more."""
    return one.training != other.training or one.strategy.strategy == other.strategy.strategy


def _fits(found: dict[str, Any]) -> bool:
    """Whether anything fits in an answer."""
    return not found.get("infeasible")


def _described(narrowed: Request, request: Request) -> str:
    """A strategy, and the settings that were chosen for it."""
    before = {**vars(request.strategy), **vars(request.training)}
    now = {**vars(narrowed.strategy), **vars(narrowed.training)}
    settings = [f"{key.replace('_', '-')} {now[key]}" for key in now if key != "strategy" and now[key] != before[key]]
    return narrowed.strategy.strategy + (f" with {', '.join(settings)}" if settings else "")


def _merged(first: dict[str, Any], answers: Answers) -> dict[str, Any]:
    """One plan of what fits in fresh processes, best first, and then of what does not fit."""
    feasible = [(each, found, Plan.from_json(found["plan"])) for each, found in answers if _fits(found)]
    plan = Plan.from_json(first["plan"])
    fitting = {each.strategy for _, _, one in feasible for each in one.candidates if each.feasible}
    others = [candidate for candidate in plan.candidates if candidate.strategy not in fitting]
    best = ranked([*(each for _, _, one in feasible for each in one.candidates if each.feasible), *others], plan.aim)
    request, _, chosen = next(each for each in feasible if best[0] in each[2].candidates)
    cost, reason = best[0].predicted, _why_rounded(plan.workload, chosen.workload)
    kept = () if cost is None else kept_memory_note(cost)
    plan = replace(plan, workload=chosen.workload, candidates=best, chosen=0, command=chosen.command)
    return {
        "plan": replace(plan, explanation=(*explanation_of(plan), *kept, *reason)).to_json(),
        "infeasible": None,
        "comparison": [trial for _, found, _ in feasible for trial in found.get("comparison", ())],
        "request": request.to_json(),
    }


def _why_rounded(asked: Workload, chosen: Workload) -> tuple[str, ...]:
    """Why updates are rounded that the user did not ask to round."""
    if chosen.weight_dtype != asked.weight_dtype:
        return ("Nothing fits with weights in float32.",)
    small = chosen.optimizer.state != asked.optimizer.state
    return ("Nothing fits with the optimizer's state in float32.",) if small else ()


def _with_smallest_budget(request: Request, first: dict[str, Any], refused: Answers, plan: Planner) -> dict[str, Any]:
    """The error that names the smallest budget that works."""
    budget = replace(request.budget, memory=None, total_memory=None)
    anywhere = replace(request, budget=budget, machine=replace(request.machine, out=None))
    cache = PlanCache(anywhere, "smallest" if request.budget.total_memory is None else "smallest-total")
    known, least = cache.find(), _given(request, first) + MB
    if known is not None and known["bytes"] < least:
        enough = replace(Request.from_json(known["request"]), budget=request.budget, machine=request.machine)
        note(f"this budget was enough for {_described(enough, request)} before; planning it once more")
        found = plan(enough)
        if _fits(found):
            return _merged(first, [(enough, found)])
    if known is None or known["bytes"] < least:
        known = _smallest(refused, least, plan)
        if known is None:
            return first
        known = _lasting(request, known, plan)
        cache.keep(known)
    return _refusal(request, first, known)


def _given(request: Request, found: dict[str, Any]) -> int:
    """The budget of a request in bytes, by the flag that was given; what ``auto`` means is in the answer."""
    memory = request.budget.memory
    return int(found["plan"]["budget"]["total_memory"]) if memory is None else parse_bytes(memory)


def _by_flag(found: dict[str, Any], growth: int) -> int:
    """The budget, by the flag that was given, that allows so much growth."""
    return Plan.from_json(found["plan"]).smallest_budget(growth)


def _smallest(refused: Answers, least: int, plan: Planner) -> dict[str, Any] | None:
    """The smallest budget, and the strategy that fits it; None if nothing fits any budget that was tried."""
    best: dict[str, Any] | None = None
    chosen: Request | None = None
    most = _most(Plan.from_json(refused[0][1]["plan"]))
    expected = [(_expected(found, each), found, each) for each, found in refused]
    sizes = [(_by_flag(found, size), each) for size, found, each in expected if size]
    for size, each in sorted(sizes, key=lambda pair: pair[0]):
        if best is not None and chosen is not None and size >= best["bytes"] and each.strategy != chosen.strategy:
            continue  # of those expected to need more, the best with other optimizer state: what that saves is a guess
        ties = chosen is not None and _roundings(each) < _roundings(chosen)
        found = _search(each, size, range(least, most), plan, best, ties)
        if found is not None and (best is None or (found["bytes"], not ties) < (best["bytes"], True)):
            best, chosen = found, each
    return best


def _lasting(request: Request, known: dict[str, Any], plan: Planner) -> dict[str, Any]:
    """A budget that is also enough for the next process.

    A process that finds measurements of this search predicts from kernels that another process has left, and so up to
    2 MB more. One that keeps none measures again, and finds some 100 kB more or less.
    """
    enough = Request.from_json(known["request"])
    for _ in range(CONFIRMATIONS):
        size = known["bytes"] // MB
        asked = replace(enough, budget=request.budget.with_memory(f"{size}MB"))
        found = plan(asked)
        if _fits(found):
            found = plan(asked)  # the first may have measured; only the next one finds that, or measures once more
        if _fits(found):
            break
        needed = -(-_by_flag(found, _expected(found, enough)) // MB)
        known = {**known, "bytes": min(max(needed, size + 1), size + LESS) * MB}
    return known


def _roundings(request: Request) -> int:
    """Number of options by which a request rounds updates; of two that need as much, the one with fewer is named."""
    return sum(getattr(request.training, name) is not None for name in ROUNDED)


def _most(plan: Plan) -> int:
    """The largest budget to try: the kernel would kill a process that grows beyond what the machine has."""
    most = int(MOST_OF_MACHINE * plan.hardware.memory_bytes)
    if plan.memory is None:
        return most
    return min(most, plan.smallest_budget(plan.memory.headroom_bytes))


def _expected(found: dict[str, Any], request: Request) -> int:
    """Growth in bytes that a request is expected to need, by another one's answer; 0 if no budget would work."""
    strategy, training, workload = request.strategy.strategy, request.training, found["plan"]["workload"]
    candidates = [each for each in found["plan"]["candidates"] if strategy in (*ANY_STRATEGY, each["strategy"])]
    smallest = min((each["smallest_bytes"] for each in candidates if each["smallest_bytes"]), default=0)
    state = SMALL_STATE if training.optimizer_state not in (None, workload["optimizer"]["state"]) else 1
    weights = SMALL_WEIGHTS if training.weight_dtype not in (None, workload["weight_dtype"]) else 1
    return int(smallest * state * weights)


def _search(
    request: Request, expected: int, sizes: range, plan: Planner, best: dict[str, Any] | None, ties: bool
) -> dict[str, Any] | None:
    """The smallest of these budgets that a request fits, and the strategy; None if it fits none that was tried.

    With ``ties`` the request is better than the ``best`` one in the same budget.
    """
    strategy, flags = request.strategy.strategy, _flags(request.training)

    def attempt(size: int) -> int | None:
        nonlocal strategy
        note(f"measuring {strategy}{flags} in {size}.0 MB, to find the smallest budget that works")
        tried = replace(request, budget=request.budget.with_memory(f"{size}MB"))
        found = plan(tried, smallest=True)
        if not found.get("smallest") and request.machine.profile_cache not in ("off", "renew"):
            found = plan(tried, smallest=True)  # its measurements are cached now, and leave less memory than measuring
        if not found.get("smallest"):
            return None
        strategy = found["plan"]["candidates"][found["plan"]["chosen"]]["strategy"]
        return _by_flag(found, found["smallest"]) // MB

    enough = None if best is None else best["bytes"] // MB
    less = LESS if request.budget.total_memory is None else LESS_GROWTH
    size = smallest_that_fits(attempt, -(-expected // MB), sizes.start // MB - 1, sizes.stop // MB, enough, less, ties)
    if size is None:
        return None
    return {"bytes": size * MB, "strategy": strategy, "request": request.to_json()}


def _flags(training: TrainingOptions, asked: TrainingOptions | None = None) -> str:
    """The flags by which updates are rounded, after a `with`, unless they were asked for; empty if there are none."""
    chosen = {name: getattr(training, name) for name in ROUNDED if getattr(training, name) is not None}
    flags = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in chosen.items()
        if asked is None or value != getattr(asked, name)
    ]
    return f" with {' '.join(flags)}" if flags else ""


def _refusal(request: Request, first: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The first answer, with an error in which the known strategy needs its budget and no other one less."""
    strategy, smallest = known["strategy"], known["bytes"]
    condition = _flags(Request.from_json(known["request"]).training, request.training)
    plan, growth, given = first["plan"], smallest - _by_flag(first, 0), _given(request, first)
    asked = Plan.from_json(plan)
    budget = replace(asked.budget, memory=given)
    candidates = [dict(each) for each in plan["candidates"]]
    for each in candidates:
        if each["smallest_bytes"] and each["strategy"] == strategy:
            each |= {"smallest_bytes": growth, "reasons": [f"needs {format_bytes(growth)}{condition}"]}
        elif each["smallest_bytes"]:
            each["smallest_bytes"] = max(each["smallest_bytes"], growth)
    work = f"{plan['workload']['model']} on {plan['workload']['data']}"
    error = InfeasibleBudgetError(
        f"{work} does not fit a budget of {budget.memory_text}{asked.rest_text}.",
        closest=f"{strategy} (needs {format_bytes(growth)}{condition})",
        lacking_bytes=smallest - given,
        smallest_bytes=smallest,
        what=budget.memory_kind,
    )
    return {**first, "plan": {**plan, "candidates": candidates}, "infeasible": explain(error).to_json()}


def smallest_that_fits(
    attempt: Try,
    expected: int,
    refused: int,
    most: int,
    enough: int | None = None,
    less: int = LESS,
    ties: bool = False,
) -> int | None:
    """The smallest budget, in MB, that works when tried, while ``less`` below it does not; None if none works.

    The search begins at the ``expected`` budget, between the largest one that is known to be ``refused`` and the
    ``most`` to try. If something else works in ``enough``, then the largest budget to try is ``less`` below it, or
    ``enough`` itself if this is better at the same size (``ties``), even if it is enough only to the MB. A larger one
    that measurements in it name is returned as soon as it is found, and not narrowed down.
    """
    refusals = {refused}
    for step in STEPS:
        high = max(int(expected * step), refused + 1)
        if enough is not None:
            high = min(high, enough if ties else enough - less)
        if high > most or high in refusals or high < refused:
            return None
        estimate = attempt(high)
        if estimate is not None:
            break
        refusals.add(high)
    else:
        return None
    if ties and enough is not None:
        estimate = min(estimate, enough)
    return _narrowed(attempt, high, max(estimate, refused + 1), refusals, enough, less)


def _narrowed(attempt: Try, high: int, estimate: int, refusals: set[int], enough: int | None, less: int) -> int:
    """Lower a budget that works until ``less`` below it is refused.

    The last estimate is tried first; after a refusal a little more, and then twice as much more.
    """
    step, refused, exceeds = less, min(refusals), estimate > high
    while high - less > refused and high - less not in refusals:
        if enough is not None and estimate > enough:
            return estimate
        low = max(each for each in refusals if each < high)
        size = estimate if low < estimate < high else high - less
        found = attempt(size)
        if found is None:
            refusals.add(size)
            estimate, step = size + step, 2 * step
        else:
            high, estimate, exceeds = size, max(found, refused + 1), found > size
    return _with_margin(attempt, high, refusals, less) if exceeds else high


def _with_margin(attempt: Try, size: int, refusals: set[int], less: int) -> int:
    """One MB more than a budget that is enough only to the MB, if that works and ``less`` below it does not."""
    lower = size + 1 - less
    if attempt(size + 1) is None:
        return size
    return size + 1 if lower <= min(refusals) or lower in refusals or attempt(lower) is None else size
