"""The memory of all processes of a run: what rests, and what a total budget leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from snugfit._core.budget import Budget
from snugfit._core.machine_memory import machine_memory
from snugfit._core.option_groups import BudgetOptions
from snugfit._core.plan import Plan
from snugfit._core.run_memory import DevicePlan, RunMemory
from snugfit._engine.distributed import commands_of_run
from snugfit._quantities import MB, format_bytes
from snugfit.errors import InfeasibleBudgetError, UsageError
from snugfit.memory import Baseline, MemoryLimit, PeakMeter, read_status
from snugfit.memory.device import device_at_rest, has_own_memory
from snugfit.memory.process import OtherProcesses, late_bytes, touched_file_bytes, warm_up


def memory_at_rest(resting: Baseline, device: torch.device) -> RunMemory | None:
    """Private memory of the run's processes, this one as at its baseline plus late imports of torch; None on CUDA."""
    if has_own_memory(device):
        return None
    others = OtherProcesses(resting.waiting).read()
    status = read_status()
    files = touched_file_bytes(warm_up)
    machine = machine_memory(status.anon + others)
    return RunMemory(resting.anon + late_bytes(), others, machine, status.file if files is None else files)


def settled_budget(options: BudgetOptions, memory: RunMemory | None) -> Budget:
    """The budget of a plan; ``memory`` above rest follows from a budget of all processes.

    Raises:
        UsageError: several processes, or a device, have memory that a total does not count.
    """
    budget = Budget(**asdict(options))
    if budget.host_memory is not None and memory is not None:
        raise UsageError(
            f"--host-memory {options.host_memory} bounds the process beside the memory of a GPU, and this run trains "
            "on the processor: use --memory."
        )
    if budget.total_memory is None:
        return budget
    if memory is None:
        raise UsageError(
            "--total-memory counts memory of processes, and on cuda a budget is of the device: use --memory."
        )
    if commands_of_run() is not None:
        raise UsageError("--total-memory counts processes of one machine; give each process of a launch its --memory.")
    total = budget.total_memory_bytes or memory.auto_bytes
    return replace(budget, total_memory=total, memory=memory.growth_in(total))


def device_plan(device: torch.device, meter: PeakMeter) -> DevicePlan | None:
    """What the process takes of a device with a memory of its own, and took at the meter's largest peak."""
    found = device_at_rest(device)
    if found is None:
        return None
    memory, most = found.memory, meter.shares
    sizes = (most["reserved_bytes"], most["allocated_bytes"])
    return DevicePlan(found.context_bytes, found.source, *sizes, memory.free(), memory.total, memory.unified)


def budget_warning(budget: Budget, memory: RunMemory | None) -> str:
    """A warning, before anything is measured, that a budget allows more than the machine has; empty if it does not."""
    if memory is None or budget.memory_bytes is None:
        return ""
    allowed, free = memory.rest_bytes + budget.memory_bytes, memory.machine.free_bytes
    if allowed <= free:
        return ""
    return (
        f"{budget.memory_flag} allows {format_bytes(allowed)} in all, and {format_bytes(free)} are free: the kernel "
        "may kill the run. Give --total-memory auto, which allows no more than is free."
    )


def measurable_bytes(budget: Budget, memory: RunMemory | None) -> int | None:
    """What measuring may add to the processes at rest: the budget, or what the machine has, if that is less."""
    if memory is None:
        return budget.memory_bytes
    free = max(memory.headroom_bytes, MB)
    return free if budget.memory_bytes is None else min(budget.memory_bytes, free)


@contextmanager
def by_flag(plan: Plan) -> Iterator[None]:
    """Name the smallest budget of an error by the flag that bounds the memory; strategies know growth alone."""
    try:
        yield
    except InfeasibleBudgetError as error:
        if plan.budget.total_memory is None:
            raise
        smallest, kind = plan.smallest_budget(error.smallest_bytes), plan.budget.memory_kind
        facts: Any = {"closest": error.closest, "lacking_bytes": error.lacking_bytes}
        raise InfeasibleBudgetError(error.message, **facts, smallest_bytes=smallest, what=kind) from error


def limit_bytes(plan: Plan, resting: Baseline, device: torch.device) -> int | None:
    """What this process may add to its baseline: the plan's budget, or less if more rests than when it was planned.

    Raises:
        InfeasibleBudgetError: the budget of all processes no longer leaves the predicted peak.
    """
    budget, total = plan.budget.memory_bytes, plan.budget.total_memory_bytes
    memory = memory_at_rest(resting, device) if total is not None else None
    if budget is None or total is None or memory is None:
        return budget
    left = min(budget, total - memory.rest_bytes)
    needed = plan.choice.predicted.least_peak_bytes if plan.choice and plan.choice.predicted else 0
    if left < needed:
        raise InfeasibleBudgetError(
            f"the processes of this run rest at {format_bytes(memory.rest_bytes)} now, and it was planned with less.",
            closest=plan.choice.strategy if plan.choice else "none",
            lacking_bytes=needed - left,
            smallest_bytes=memory.total_for(needed),
            what=plan.budget.memory_kind,
        )
    return left


def run_limit(plan: Plan, resting: Baseline, device: torch.device) -> MemoryLimit:
    """The limit that enforces a plan's budget; in a budget of all processes, late imports take from it.

    Raises:
        InfeasibleBudgetError: as :func:`limit_bytes`.
    """
    counts_imports = plan.budget.total_memory is not None
    return MemoryLimit(
        limit_bytes(plan, resting, device),
        resting,
        device,
        counts_imports=counts_imports,
        host_bytes=plan.budget.host_memory_bytes,
    )
