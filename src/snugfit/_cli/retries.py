"""If nothing fits: plan again in fresh processes, and find the smallest memory budget that works.

Memory that refused measurements leave behind counts to the budget. So each strategy is planned again alone, and then
with the leanest of those settings that the user did not name (``snugfit._engine.retries``). If nothing fits either,
the leanest requests are measured in larger budgets.

A measurement in one budget gives only an estimate of the smallest: in a smaller budget other batch sizes are measured,
which leave other kernels in memory. VGG-8 in bfloat16 had 24.1 MB in use after profiling in 91 MB, and 27.9 in 83 MB,
which 91 MB had named. So the budget that is named was tried itself, as was the one ``LESS`` below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from snugfit._cli.failures import explain
from snugfit._cli.output import note
from snugfit._cli.plan_cache import Answer
from snugfit._core.explanation import explanation_of
from snugfit._core.plan import Plan
from snugfit._core.ranking import ranked
from snugfit._core.request import Request
from snugfit._quantities import format_bytes, parse_bytes
from snugfit.errors import InfeasibleBudgetError

MB = 10**6
HOPELESS = 2
"""A strategy whose expected need is more than this many times the budget is not asked alone. The largest ratio seen of
a strategy that then fitted was 1.65: memory left by earlier measurements is part of what it is expected to need."""
MOST_OF_MACHINE = 0.7
"""Largest share of the machine's memory to try when looking for the smallest budget that would do."""
STEPS = (1.0, 1.3, 1.7)
"""Budgets that are asked for until one does, over what is expected to."""
LESS = 3
"""MB below the smallest budget that are known not to do."""
Try = Callable[[int], "int | None"]
"""Plans with a budget in MB in a fresh process: the smallest that would do by its measurements; None if refused."""
Ask = Callable[[Request], dict[str, Any]]
"""Asks a fresh process for a plan; ``infeasible`` is set where nothing fits."""


def settled(request: Request, first: dict[str, Any], plan: Ask, measure: Ask) -> dict[str, Any]:
    """What fits when asked in processes of their own, or the refusal with the smallest budget that would do.

    Args:
        request: the question.
        first: the answer of the first process.
        plan: asks a fresh process.
        measure: asks a fresh process, which also tells the smallest budget that its plan would fit.

    Returns:
        An answer; ``request`` is that of the choice, where another one than the first fits.
    """
    if not first.get("infeasible") or request.budget.memory is None:
        return first
    asked: list[tuple[Request, dict[str, Any]]] = []
    for each in map(Request.from_json, first.get("apart", ())):
        if _guess(first, each.strategy.strategy) > HOPELESS * parse_bytes(request.budget.memory):
            asked.append((each, first))
        elif not any(fits(found) for other, found in asked if other.strategy.strategy == each.strategy.strategy):
            note(f"nothing fits yet; asking {_words(each, request)} in a process of its own")
            asked.append((each, plan(each)))
    if any(fits(found) for _, found in asked):
        return _together(first, asked)
    return _named(request, first, asked or [(request, first)], measure)


def fits(found: dict[str, Any]) -> bool:
    """Whether an answer is something that fits."""
    return not found["infeasible"]


def _words(narrowed: Request, request: Request) -> str:
    """What is asked: a strategy, and the settings that were chosen for it."""
    given, asked = request.strategy.__dict__, narrowed.strategy.__dict__
    chosen = [f"{key.replace('_', '-')} {value}" for key, value in asked.items() if value != given[key]]
    chosen = [each for each in chosen if not each.startswith("strategy ")]
    return narrowed.strategy.strategy + (f" with {', '.join(chosen)}" if chosen else "")


def _together(first: dict[str, Any], asked: Sequence[tuple[Request, dict[str, Any]]]) -> dict[str, Any]:
    """One plan of what fits in processes of their own, the best of it first, and of what does not."""
    feasible = [(each, found, Plan.from_json(found["plan"])) for each, found in asked if fits(found)]
    own = {each.strategy.strategy for each, _, _ in feasible}
    plan = Plan.from_json(first["plan"])
    others = [candidate for candidate in plan.candidates if candidate.strategy not in own]
    best = ranked([*(each for _, _, one in feasible for each in one.candidates if each.feasible), *others], plan.aim)
    request, _, chosen = next(each for each in feasible if best[0] in each[2].candidates)
    plan = replace(plan, candidates=best, chosen=0, command=chosen.command)
    return {
        "plan": replace(plan, explanation=explanation_of(plan)).to_json(), "infeasible": None,
        "comparison": [trial for _, found, _ in feasible for trial in found["comparison"]],
        "request": request.to_json(),
    }  # fmt: skip


def _named(
    request: Request, first: dict[str, Any], refused: Sequence[tuple[Request, dict[str, Any]]], measure: Ask
) -> dict[str, Any]:
    """The refusal, which names the smallest budget that would do."""
    alike = replace(request, budget=replace(request.budget, memory=None), machine=replace(request.machine, out=None))
    answer = Answer(alike, "smallest")
    known, least = answer.find(), parse_bytes(str(request.budget.memory)) + MB
    if known is None or known["bytes"] < least:
        known = _smallest(refused, least, measure)
        if known is None:
            return first
        answer.keep(known)
    return _refusal(request, first, known["strategy"], known["bytes"])


def _smallest(refused: Sequence[tuple[Request, dict[str, Any]]], least: int, measure: Ask) -> dict[str, Any] | None:
    """The smallest budget, and the strategy that fits it; None where no way fits any that was tried."""
    best: dict[str, Any] | None = None
    most = int(MOST_OF_MACHINE * refused[0][1]["plan"]["hardware"]["memory_bytes"])
    guesses = sorted(
        (
            (guess, number, asked)
            for number, (asked, found) in enumerate(refused)
            if (guess := _guess(found, asked.strategy.strategy))
        ),
        key=lambda each: each[:2],
    )
    for guess, _, asked in guesses:
        if best is not None and guess >= best["bytes"]:
            break
        found = _fitting(asked, guess, least, most, measure, best)
        if found is not None and (best is None or found["bytes"] < best["bytes"]):
            best = found
    return best


def _guess(found: dict[str, Any], strategy: str) -> int:
    """The budget that a strategy (any where it is ``auto``) is expected to need; 0 where none would do."""
    asked = [each for each in found["plan"]["candidates"] if strategy in ("auto", each["strategy"])]
    return min((each["smallest_bytes"] for each in asked if each["smallest_bytes"]), default=0)


def _fitting(
    asked: Request, guess: int, least: int, most: int, measure: Ask, best: dict[str, Any] | None
) -> dict[str, Any] | None:
    strategy = asked.strategy.strategy

    def ask(size: int) -> int | None:
        nonlocal strategy
        note(f"measuring {asked.strategy.strategy} in {size}.0 MB, to tell what would do")
        found = measure(replace(asked, budget=replace(asked.budget, memory=f"{size}MB")))
        if not found.get("smallest"):
            return None
        strategy = found["plan"]["candidates"][found["plan"]["chosen"]]["strategy"]
        return int(found["smallest"] // MB)

    enough = None if best is None else best["bytes"] // MB
    size = smallest_that_fits(ask, -(-guess // MB), least // MB - 1, most // MB, enough)
    return None if size is None else {"bytes": size * MB, "strategy": strategy}


def _refusal(request: Request, first: dict[str, Any], strategy: str, smallest: int) -> dict[str, Any]:
    """The refusal in which that strategy, and no other one, needs that much and none needs less."""
    plan, size = first["plan"], format_bytes(smallest)
    lacking = smallest - parse_bytes(str(request.budget.memory))
    candidates = [_with_smallest(each, strategy, smallest) for each in plan["candidates"]]
    error = InfeasibleBudgetError(
        f"{plan['workload']['model']} on {plan['workload']['data']} does not fit a budget of "
        f"{format_bytes(smallest - lacking)} of memory.",
        closest=f"{strategy} (needs {size})", lacking_bytes=lacking, smallest_bytes=smallest,
    )  # fmt: skip
    return {**first, "plan": {**plan, "candidates": candidates}, "infeasible": explain(error).to_json()}


def _with_smallest(candidate: dict[str, Any], strategy: str, smallest: int) -> dict[str, Any]:
    if not candidate["smallest_bytes"]:
        return candidate
    if candidate["strategy"] == strategy:
        return {**candidate, "smallest_bytes": smallest, "reasons": [f"needs {format_bytes(smallest)}"]}
    return {**candidate, "smallest_bytes": max(candidate["smallest_bytes"], smallest)}


def smallest_that_fits(ask: Try, guess: int, refused: int, most: int, enough: int | None = None) -> int | None:
    """The smallest budget, in MB, that fits when asked for, where ``LESS`` below it does not.

    Args:
        ask: asks a fresh process.
        guess: what is expected to do, in MB.
        refused: largest budget that is known not to do.
        most: largest budget to try.
        enough: what is not needed more exactly: a larger one than this is returned as soon as it is found.

    Returns:
        None where nothing fits any budget that was tried.
    """
    refusals = {refused}
    for step in STEPS:
        high = max(int(guess * step), refused + 1)
        if high > most:
            return None
        told = ask(high)
        if told is not None:
            break
        refusals.add(high)
    else:
        return None
    return _narrowed(ask, max(high, told), max(told, refused + 1), refusals, enough)


def _narrowed(ask: Try, high: int, told: int, refusals: set[int], enough: int | None) -> int:
    """Lower a budget that fits, while ``LESS`` below it is not refused.

    What was told by the last answer is tried first; after a refusal a little more, and then twice as much more.
    """
    step, refused = LESS, min(refusals)
    while high - LESS > refused and high - LESS not in refusals:
        if enough is not None and told > enough:
            return told
        low = max(each for each in refusals if each < high)
        size = told if low < told < high else high - LESS
        found = ask(size)
        if found is None:
            refusals.add(size)
            told, step = size + step, 2 * step
        else:
            high, told = max(size, found), max(found, refused + 1)
    return high
