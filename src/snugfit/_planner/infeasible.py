"""The error for a plan in which nothing fits."""

from __future__ import annotations

from snugfit._core.plan import Candidate, Plan
from snugfit._quantities import format_bytes
from snugfit.errors import InfeasibleBudgetError, InfeasibleTimeError


def infeasible_error(plan: Plan) -> InfeasibleBudgetError | InfeasibleTimeError:
    """The error for a plan without a feasible candidate: the closest one, its lack, and the smallest budget."""
    asked = [candidate for candidate in plan.candidates if candidate.considered]
    model, work = plan.workload.model, f"{plan.workload.model} on {plan.workload.data}"
    short = [(lack, candidate) for candidate in asked if (lack := _lack(plan, candidate)) is not None]
    if short:
        (lacking, smallest), each = min(short, key=lambda pair: pair[0])
        bound = f"a budget of {plan.budget}{plan.rest_text}"
        if plan.budget.memory_bytes is None and each.smallest_bytes is not None:
            bound = f"the {format_bytes(plan.free_bytes)} of memory that this machine has free for it"
        message = f"{work} does not fit {bound}."
        closest = f"{each.strategy} ({'; '.join(each.reasons)})"
        kind = "budget" if each.smallest_bytes is None else plan.budget.memory_kind
        return InfeasibleBudgetError(
            message, closest=closest, lacking_bytes=lacking, smallest_bytes=smallest, what=kind
        )
    refused = asked or plan.candidates  # what the request excludes is not considered
    reasons = "; ".join(f"{each.strategy}: {', '.join(each.reasons)}" for each in refused if each.reasons)
    ratios = [candidate.smallest_ratio for candidate in asked if candidate.smallest_ratio is not None]
    if ratios:
        advice = "train the classifier alone with --scheme head"
        return InfeasibleTimeError(f"{work}: {reasons}", smallest_ratio=min(ratios), advice=advice)
    message, smallest = f"no strategy can serve {model}: {reasons}.", plan.budget.memory_bytes or 0
    return InfeasibleBudgetError(message, closest="none", lacking_bytes=0, smallest_bytes=smallest)


def _lack(plan: Plan, candidate: Candidate) -> tuple[int, int] | None:
    """Bytes that a candidate lacks, and the smallest sufficient budget: of memory, or else of storage or the host."""
    cost, budget = candidate.predicted, plan.budget
    memory = plan.free_bytes if budget.memory_bytes is None else budget.memory_bytes
    if candidate.smallest_bytes is not None and candidate.smallest_bytes > memory:
        smallest = plan.smallest_budget(candidate.smallest_bytes)
        return smallest - (budget.total_memory_bytes or memory), smallest
    if cost is None:
        return None
    for given, needed in ((budget.storage_bytes, cost.storage_bytes), (budget.host_memory_bytes, cost.host_bytes)):
        if given is not None and needed > given:
            return needed - given, needed
    return None
