"""Memory that a plan lets the heap keep between steps, where the budget has room for it."""

from __future__ import annotations

from dataclasses import replace

from snugfit._core.budget import Budget
from snugfit._core.explanation import explanation_of, kept_memory_note
from snugfit._core.plan import Plan
from snugfit._core.profile import Profile, saved_share
from snugfit.memory.freed_memory import fillable_bytes, kept_peak, room_bytes


def with_kept_memory(plan: Plan) -> Plan:
    """The plan with the peaks that its choice may reach if the heap keeps freed memory.

    Unchanged if memory is the aim, without room, on a device with a memory of its own, and without glibc; a phase
    without training steps, such as the test of an exit, keeps nothing.
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
    plan = replace(plan, candidates=tuple(choice if each is plan.choice else each for each in plan.candidates))
    return replace(plan, explanation=(*explanation_of(plan), *kept_memory_note(cost)))


def with_kept_seconds(profile: Profile, budget: Budget, free_bytes: int) -> Profile:
    """The profile with the seconds of steps that find freed memory in the heap, as far as there is room for it.

    Steps are measured without it. ``free_bytes`` has the machine above the processes at rest.
    """
    room = fillable_bytes(room_bytes(budget.memory_bytes, free_bytes))
    lines = {
        name: replace(line, room_bytes=room, beside_bytes=profile.base_bytes) for name, line in profile.lines.items()
    }
    tensors, steps = profile.tensors, profile.tensors.steps if profile.tensors else None
    if tensors is not None and steps is not None:
        peak = profile.base_bytes + max((line.bytes_at(steps.batch) for line in lines.values()), default=1)
        saved = saved_share("layers", room, peak)
        steps = replace(steps.times(1 - saved * steps.mapping_share), mapping_share=0.0)
        tensors = replace(tensors, steps=steps)
    return replace(profile, lines=lines, tensors=tensors)
