"""From strategies and a budget to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.core.budget import Budget
from snugfit.core.hardware import Hardware
from snugfit.core.plan import Candidate, Correction, Plan
from snugfit.core.profile import Profile
from snugfit.core.registry import TRANSFER
from snugfit.core.serial import to_data
from snugfit.core.strategy import Strategy
from snugfit.core.workload import Workload
from snugfit.errors import InfeasibleBudgetError, InfeasibleTimeError, ModelError
from snugfit.memory import MemoryLimit, PeakMeter, is_out_of_memory, release_memory
from snugfit.planner.calibration import PastRun, corrected, correction
from snugfit.planner.identity import identified
from snugfit.profiling import LOOKING_BYTES, Measurements, Probe, TensorProbe, describe, measure_probes, unit_facts
from snugfit.quantities import format_bytes

if TYPE_CHECKING:
    from snugfit.chain import Chain


def search(
    strategies: Sequence[Strategy],
    workload: Workload,
    chain: Chain,
    hardware: Hardware,
    budget: Budget,
    meter: PeakMeter,
    limit: MemoryLimit,
    on_measured: Callable[[str, int, int], object] | None,
    known: Measurements | None = None,
    past: Sequence[PastRun] = (),
) -> tuple[Plan, Profile]:
    """Measure the strategies' probes and rank what they propose.

    Args:
        strategies: what to consider, with the user's settings.
        workload, chain, hardware, budget: the question.
        meter: memory above the baseline.
        limit: the memory budget, in force.
        on_measured: told of every measured probe; None measures nothing, and so finds nothing feasible.
        known: what was measured before; what is measured now is added.
        past: runs on this machine, oldest first, which predictions are corrected by.

    Returns:
        The plan, feasible candidates first and the best of them first, and the profile behind it.

    Raises:
        ModelError: the only strategy finds the model unusable.
    """
    alone = len(strategies) == 1
    with limit.loosened(LOOKING_BYTES):
        refused = {s.name: _reasons(s, workload, chain, hardware, alone=alone) for s in strategies}
        able = [strategy for strategy in strategies if not refused[strategy.name]]
        network = "\n".join(describe(unit.module) for unit in chain.all_units)
        probes = [
            identified(probe, strategy, workload, network)
            for strategy in able
            for probe in strategy.probes(workload, chain, hardware)
        ]
    profile = _measured(probes, meter, limit, on_measured, known)
    candidates = [Candidate(name, False, reasons=tuple(reasons)) for name, reasons in refused.items() if reasons]
    with limit.loosened(LOOKING_BYTES):
        profile = replace(profile, units=unit_facts(chain))
        for strategy in able:
            learnt = correction(past, strategy.name, workload)
            candidates.extend(_candidates(strategy, workload, profile, hardware, budget, learnt))
    transfers = any(candidate.strategy in TRANSFER for candidate in candidates)
    ranked = sorted(candidates, key=lambda candidate: _rank(candidate, transfers=transfers))
    chosen = 0 if ranked and ranked[0].feasible else None
    return Plan(workload, budget, hardware, tuple(ranked), chosen), profile


def _measured(
    probes: Sequence[Probe | TensorProbe], meter: PeakMeter, limit: MemoryLimit,
    on_measured: Callable[[str, int, int], object] | None, known: Measurements | None,
) -> Profile:  # fmt: skip
    """The profile; floors alone where the budget has no room for measuring, between two steps even, and so for none."""
    try:
        return measure_probes(probes, meter, limit, on_measured, known)
    except (RuntimeError, MemoryError, SystemError) as error:
        if not is_out_of_memory(error):
            raise
    with limit.loosened(LOOKING_BYTES):
        release_memory()
        return measure_probes(probes, meter, limit, None, known)


def _reasons(
    strategy: Strategy, workload: Workload, chain: Chain, hardware: Hardware, *, alone: bool
) -> list[str]:  # fmt: skip
    """Why a strategy cannot serve; an unusable model is an error where no other strategy is considered."""
    try:
        return strategy.validate(workload, chain, hardware)
    except ModelError as error:
        if alone:
            raise
        return [str(error)]


def _rank(candidate: Candidate, *, transfers: bool) -> tuple[bool, int, float]:
    """Feasible ones first, faster ones first; where weights are to be transferred, what is expected to lose less first.

    Fine-tuning every weight by its own gradient loses nothing, a frozen network with something beside it loses less
    than one whose weights are taken apart by local losses.
    """
    seconds = candidate.predicted.seconds if candidate.predicted else float("inf")
    loss = 0 if candidate.exact or not transfers else 1 if candidate.strategy in TRANSFER else 2
    return (not candidate.feasible, loss, seconds)


def _candidates(
    strategy: Strategy, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget, learnt: Correction
) -> list[Candidate]:
    candidates = []
    memory = None if budget.memory_bytes is None else int(budget.memory_bytes / learnt.peak)
    for proposal in strategy.propose(workload, profile, hardware, replace(budget, memory=memory)):
        cost = corrected(proposal.estimate(workload, profile, hardware), learnt)
        reasons = _excess(budget, cost.peak_bytes, cost.storage_bytes)
        candidates.append(
            Candidate(
                strategy.name,
                not reasons,
                to_data(proposal),
                cost,
                reasons,
                smallest_bytes=cost.peak_bytes if _too_much(budget.memory_bytes, cost.peak_bytes) else None,
                exact=strategy.exact,
                correction=learnt,
            )
        )
    if not candidates:
        lack = strategy.shortfall(workload, profile, hardware, budget)
        candidates.append(
            Candidate(
                strategy.name, False, to_data(strategy), None, lack.reasons, lack.smallest_bytes, strategy.exact,
                lack.smallest_ratio,
            )
        )  # fmt: skip
    return candidates


def _excess(budget: Budget, peak_bytes: int, storage_bytes: int) -> tuple[str, ...]:
    reasons = []
    if _too_much(budget.memory_bytes, peak_bytes):
        reasons.append(f"needs {format_bytes(peak_bytes)} of memory")
    if _too_much(budget.storage_bytes, storage_bytes):
        reasons.append(f"needs {format_bytes(storage_bytes)} of storage")
    return tuple(reasons)


def _too_much(budget_bytes: int | None, needed_bytes: int) -> bool:
    return budget_bytes is not None and needed_bytes > budget_bytes


def infeasible_error(plan: Plan) -> InfeasibleBudgetError | InfeasibleTimeError:
    """The error for a plan in which nothing fits: the closest candidate, what it lacks, the smallest budget."""
    short = [(lack, candidate) for candidate in plan.candidates if (lack := _lack(plan.budget, candidate)) is not None]
    ratios = [candidate.smallest_ratio for candidate in plan.candidates if candidate.smallest_ratio is not None]
    if not short and ratios:
        return InfeasibleTimeError(
            f"{plan.workload.model} on {plan.workload.data}: "
            + "; ".join(f"{c.strategy}: {', '.join(c.reasons)}" for c in plan.candidates),
            smallest_ratio=min(ratios),
            advice="train the classifier alone with --scheme head",
        )
    if not short:
        reasons = "; ".join(f"{c.strategy}: {', '.join(c.reasons)}" for c in plan.candidates)
        return InfeasibleBudgetError(
            f"no strategy can serve {plan.workload.model}: {reasons}.",
            closest="none", lacking_bytes=0, smallest_bytes=plan.budget.memory_bytes or 0,
        )  # fmt: skip
    (lacking, smallest), closest = min(short, key=lambda pair: pair[0])
    return InfeasibleBudgetError(
        f"{plan.workload.model} on {plan.workload.data} does not fit a budget of {plan.budget}.",
        closest=f"{closest.strategy} ({'; '.join(closest.reasons)})",
        lacking_bytes=lacking,
        smallest_bytes=smallest,
    )


def _lack(budget: Budget, candidate: Candidate) -> tuple[int, int] | None:
    """Bytes that a candidate lacks, and the smallest budget that would do: of memory, or of storage if that is all."""
    cost, memory = candidate.predicted, budget.memory_bytes
    if candidate.smallest_bytes is not None and (memory is None or candidate.smallest_bytes > memory):
        return candidate.smallest_bytes - (memory or 0), candidate.smallest_bytes
    if cost is not None and _too_much(budget.storage_bytes, cost.storage_bytes):
        return cost.storage_bytes - (budget.storage_bytes or 0), cost.storage_bytes
    return None
