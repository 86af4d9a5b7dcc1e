"""The candidates of a strategy: what it proposes for a profile and a budget, with costs and reasons."""

from __future__ import annotations

from dataclasses import replace

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Candidate, Correction
from snugfit._core.profile import Profile
from snugfit._core.registry import find_config
from snugfit._core.serial import to_data
from snugfit._core.workload import Workload
from snugfit._planner.calibration import corrected
from snugfit._quantities import format_bytes
from snugfit._training.strategy import Strategy


def candidates_of(
    strategy: Strategy,
    workload: Workload,
    profile: Profile,
    hardware: Hardware,
    budget: Budget,
    factors: Correction,
    own: Profile | None = None,
) -> list[Candidate]:
    """A strategy's proposals within a budget, or the reason for none.

    ``factors`` correct its predictions. Its smallest budget follows from the profile of its ``own`` probes, if given.
    """
    candidates = []
    memory = None if budget.memory_bytes is None else int(budget.memory_bytes / factors.peak)
    for proposal in strategy.propose(workload, profile, hardware, replace(budget, memory=memory)):
        cost = corrected(proposal.estimate(workload, profile, hardware), factors)
        too_big = _too_much(budget.memory_bytes, cost.peak_bytes)
        reasons = [f"needs {format_bytes(cost.peak_bytes)} of memory"] if too_big else []
        if _too_much(budget.storage_bytes, cost.storage_bytes):
            reasons.append(f"needs {format_bytes(cost.storage_bytes)} of storage")
        if _too_much(budget.host_memory_bytes, cost.host_bytes):
            reasons.append(f"needs {format_bytes(cost.host_bytes)} of host memory")
        exact = proposal.exact and not workload.compresses
        candidate = Candidate(strategy.name, not reasons, to_data(proposal), cost, tuple(reasons), exact=exact)
        fine_tunes = workload.fine_tunes_few and find_config(strategy.name).fine_tunes
        smallest = cost.peak_bytes if too_big else None
        few = norm_images(candidate, workload, profile)
        candidate = replace(candidate, smallest_bytes=smallest, correction=factors, norm_images=few)
        candidates.append(replace(candidate, fine_tunes=fine_tunes))
    if not candidates:
        lack = strategy.shortfall(workload, own or profile, hardware, budget)
        exact = strategy.exact and not workload.compresses
        candidate = Candidate(strategy.name, False, to_data(strategy), reasons=lack.reasons, exact=exact)
        candidates = [replace(candidate, smallest_bytes=lack.smallest_bytes, smallest_ratio=lack.smallest_ratio)]
    return candidates


def norm_images(candidate: Candidate, workload: Workload, profile: Profile) -> int | None:
    """Images that batch norms normalise together, where a candidate's ``norm_images`` names them."""
    images, settings = min(candidate.batches, default=0), candidate.settings
    if settings.get("whole_batch"):  # all images of a step, whatever its micro-batches
        images = workload.step_images(int(settings["micro_batch"]), int(settings["micro_batches"]))
    fewer = candidate.exact and 0 < images < workload.effective_batch
    return images if fewer and any(unit.tracks for unit in profile.units) else None


def _too_much(budget_bytes: int | None, needed_bytes: int) -> bool:
    return budget_bytes is not None and needed_bytes > budget_bytes
