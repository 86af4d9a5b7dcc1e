"""Memory that a plan lets the heap keep between steps, where the budget has room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from snugfit._core.explanation import explanation_of, kept_memory_note
from snugfit._core.plan import Candidate, Correction, Plan, ranked
from snugfit._planner.calibration import PastRun, corrected, correction
from snugfit.memory.freed_memory import kept_peak


def with_kept_memory(plan: Plan, runs: Sequence[PastRun] = ()) -> Plan:
    """The plan with the peaks that its choice may reach if the heap keeps freed memory.

    Unchanged if memory is the aim, without room, on a device with a memory of its own, and without glibc; a phase
    without training steps, such as the test of an exit, keeps nothing. Past ``runs`` that kept freed memory, too,
    correct the predicted seconds, because steps are measured without it, unless another strategy would then be better.
    """
    cost = plan.choice.predicted if plan.choice else None
    if plan.choice is None or cost is None or plan.memory is None or plan.aim == "memory":
        return plan
    budget, free = plan.budget.memory_bytes, plan.free_bytes
    peaks = [kept_peak(each.peak_bytes, budget, free) if each.steps else each.peak_bytes for each in cost.phases]
    phases = tuple(
        replace(phase, peak_bytes=peak, kept_bytes=peak - phase.peak_bytes)
        for phase, peak in zip(cost.phases, peaks, strict=True)
    )
    most = max((phase.peak_bytes for phase in phases), default=0)
    if most <= cost.peak_bytes:
        return plan
    cost = replace(cost, phases=phases, peak_bytes=most)
    choice = replace(plan.choice, predicted=cost)
    others = [each for each in plan.candidates if each is not plan.choice]
    if ranked([slower := _corrected(choice, plan, runs), *others], plan.aim)[0] is slower:
        choice = slower  # otherwise it would be compared with strategies that lack such runs
    plan = replace(plan, candidates=tuple(choice if each is plan.choice else each for each in plan.candidates))
    return replace(plan, explanation=(*explanation_of(plan), *kept_memory_note(cost)))


def _corrected(choice: Candidate, plan: Plan, runs: Sequence[PastRun]) -> Candidate:
    """The choice with seconds as in past runs that kept freed memory, if there are any."""
    found, present = correction(runs, choice.strategy, plan.workload, kept=True), choice.correction
    if not found.runs or choice.predicted is None:
        return choice
    cost = corrected(choice.predicted, Correction(seconds=found.seconds / present.seconds))
    return replace(choice, predicted=cost, correction=replace(found, peak=present.peak))
