"""Memory that a plan lets the heap keep between steps, where the budget has room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from snugfit._core.explanation import kept_memory_note
from snugfit._core.plan import Candidate, Correction, Phase, Plan
from snugfit._planner.calibration import PastRun, corrected, correction
from snugfit.memory.address_space import KERNEL_BYTES
from snugfit.memory.freed_memory import LEVELS
from snugfit.memory.process import sets_thresholds

MOST_GROWTH = 1.4
"""Factor up to which a peak may grow."""
LEFT_SHARE = 0.05
"""Share of a memory budget that is left free."""
FREE_SHARE = 0.5
"""Share of the machine's free memory up to which a peak may grow for speed."""


def with_kept_memory(plan: Plan, runs: Sequence[PastRun] = ()) -> Plan:
    """The plan with the peaks that its choice may reach if the heap keeps freed memory.

    Unchanged if memory is the aim, without room, on a device with a memory of its own, without glibc, and if phases
    without training steps follow, whose small peaks would grow by fragments of the heap. Past ``runs`` that kept freed
    memory, too, correct the predicted seconds: steps are measured without it.
    """
    cost = plan.choice.predicted if plan.choice else None
    if plan.choice is None or cost is None or plan.memory is None or plan.aim == "memory" or not sets_thresholds():
        return plan
    budget, room = plan.budget.memory_bytes, int(plan.free_bytes * FREE_SHARE)
    if budget is not None:
        room = min(room, int(budget * (1 - LEFT_SHARE)) - KERNEL_BYTES)
    phases = tuple(_with_kept(phase, room) for phase in cost.phases)
    most = max((phase.peak_bytes for phase in phases), default=0)
    if most <= cost.peak_bytes or not all(phase.steps for phase in phases):
        return plan
    cost = replace(cost, phases=phases, peak_bytes=most)
    choice = _corrected(replace(plan.choice, predicted=cost), plan, runs)
    candidates = tuple(choice if each is plan.choice else each for each in plan.candidates)
    return replace(plan, candidates=candidates, explanation=(*plan.explanation, *kept_memory_note(cost)))


def _corrected(choice: Candidate, plan: Plan, runs: Sequence[PastRun]) -> Candidate:
    """The choice with seconds as in past runs that kept freed memory, if there are any."""
    found, present = correction(runs, choice.strategy, plan.workload, kept=True), choice.correction
    if not found.runs or choice.predicted is None:
        return choice
    cost = corrected(choice.predicted, Correction(seconds=found.seconds / present.seconds))
    return replace(choice, predicted=cost, correction=replace(found, peak=present.peak))


def _with_kept(phase: Phase, room_bytes: int) -> Phase:
    """The phase with a peak of up to ``room_bytes``; unchanged if no level is possible so."""
    peak = min(int(phase.peak_bytes * MOST_GROWTH), room_bytes)
    if peak < phase.peak_bytes * LEVELS[1].growth:
        return phase
    return replace(phase, peak_bytes=peak, kept_bytes=peak - phase.peak_bytes)
