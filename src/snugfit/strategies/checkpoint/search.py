"""Select the schedules that are worth measuring, and the fastest measured one within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from snugfit._core.budget import Budget
from snugfit._core.profile import ProbeLine, Profile
from snugfit._core.workload import Workload
from snugfit.strategies.checkpoint.candidates import Candidate
from snugfit.strategies.full_network import batch_settings, network_cost
from snugfit.strategies.memory_estimates import TENSOR_TO_PROCESS, available_headroom
from snugfit.strategies.micro_batch import MicroBatching, divisors, hold_modes, line_name

MARGIN_BYTES = 3_000_000
"""Margin for the headroom of a step, which may shrink while probes are measured. Measuring stops only once a schedule
fits with this margin."""

PROCESS_TO_TENSOR = 1.01
"""Typical process peak over tensor peak. A schedule that would fit only with less is not measured."""

MAX_TIME_RATIO = 0.95
"""A schedule is measured if its expected time is below this share of the time of the fastest one that fits."""


def fastest_schedule(
    probes: Iterable[str], workload: Workload, profile: Profile, budget: Budget, *, accumulate: bool
) -> tuple[str, MicroBatching] | None:
    """Probe and micro-batches of the fastest schedule at the largest effective batch of any; None if none fits.

    ``probes`` are names without the suffix for held gradients.
    """
    found: dict[tuple[int, float], tuple[str, MicroBatching]] = {}
    for probe in probes:
        micro = batch_settings(workload, profile, budget, probe, accumulate=accumulate)
        if micro is not None:
            seconds = network_cost(profile, probe, workload, micro).seconds_per_epoch
            found.setdefault((-micro.effective_batch, seconds), (probe, micro))
    return found[min(found)] if found else None


@dataclass(frozen=True)
class MeasurementFilter:
    """Decides which schedules are worth measuring.

    The last candidate has the least memory. ``left_bytes`` bounds the memory that one measurement leaves behind.
    """

    candidates: Sequence[Candidate]
    workload: Workload
    accumulate: bool
    left_bytes: int = 0

    def is_worth_measuring(
        self, candidate: Candidate, hold: bool, tried: Mapping[str, ProbeLine | None], available: float
    ) -> bool:
        """Whether a candidate may fit and be faster than the measured ones; see :class:`snugfit.profiling.Probe`.

        While nothing fits the effective batch, the last candidate is always measured. Another one is measured only if
        the kernels that it leaves behind do not take the headroom that the last one needs. Once something fits, only
        the candidate with the least expected time is measured.
        """
        if _line(candidate, hold) in tried:
            return False
        headroom = available_headroom(available)
        lines = {name: line for name, line in tried.items() if line is not None}
        budget = Budget(None if available == float("inf") else max(int(available) - MARGIN_BYTES, 1))
        probes = [each.probe for each in self.candidates]
        found = fastest_schedule(probes, self.workload, Profile((), lines), budget, accumulate=self.accumulate)
        least = candidate.bytes_at(1 if hold else self._batch, self._batch, hold=hold)
        may_fit = least * PROCESS_TO_TENSOR <= headroom
        if found is None or found[1].effective_batch != self._batch:
            last = self.candidates[-1]
            needed = last.bytes_at(1, self._batch, hold=False) * TENSOR_TO_PROCESS + 2 * self.left_bytes
            return candidate is last or (may_fit and needed <= headroom)  # its own kernels included
        estimate = StepEstimate.of(self.candidates, lines, self._batch)
        if estimate is None:
            return may_fit
        untried = {
            (each.probe, held): estimate.sample_seconds(each, held, self._sizes(held), headroom - self.left_bytes)
            for each in self.candidates
            for held in hold_modes(self.accumulate)
            if _line(each, held) not in tried
        }
        probe, micro = found
        sample_seconds = micro.seconds(lines[micro.line(probe)]) / micro.micro_batch
        expected = untried[candidate.probe, hold]
        return expected <= min(untried.values()) and expected < MAX_TIME_RATIO * sample_seconds

    @property
    def _batch(self) -> int:
        return self.workload.effective_batch

    def _sizes(self, hold: bool) -> tuple[int, ...]:
        """Batches that a candidate may train at, smallest first."""
        return divisors(self._batch)[:-1] if hold else (self._batch,)


@dataclass(frozen=True)
class StepEstimate:
    """Estimates the steps of unmeasured schedules from measured ones.

    Attributes:
        batch: the effective batch.
        fixed_seconds, slope_seconds: of a step without recomputation, and of each further sample in it.
        smallest_batch: the smallest batch of a step.
        process_to_tensor: process peak over tensor bytes, by whether gradients are held.
    """

    batch: int
    fixed_seconds: float
    slope_seconds: float
    smallest_batch: int
    process_to_tensor: Mapping[bool, float]

    @classmethod
    def of(cls, candidates: Sequence[Candidate], lines: Mapping[str, ProbeLine], batch: int) -> StepEstimate | None:
        """From all lines; None if none has more than one point, which is required for a slope."""
        named = {_line(each, hold): (each, hold) for each in candidates for hold in (False, True)}
        ratios, sloped = {}, None
        for name, line in lines.items():
            if name not in named or not line.points:
                continue
            (candidate, hold), point = named[name], line.points[-1]
            ratios[hold] = point.peak_bytes / candidate.bytes_at(point.batch, batch, hold=hold)
            if sloped is None and len(line.points) > 1:
                sloped = line, candidate.seconds * (2 if hold else 1)
        if sloped is None:
            return None
        line, times = sloped
        return cls(batch, line.fixed_seconds / times, line.sample_seconds / times, line.smallest_batch, ratios)

    def sample_seconds(self, candidate: Candidate, hold: bool, sizes: Sequence[int], headroom: float) -> float:
        """Expected seconds of a sample at the largest of ``sizes`` that fits; infinite if none fits.

        If weights dominate the time of a step, a step of few images takes hardly less time than one of more images.
        """
        ratio = self.process_to_tensor.get(hold, max(self.process_to_tensor.values()))
        fits = [
            size
            for size in sizes
            if size >= self.smallest_batch and candidate.bytes_at(size, self.batch, hold=hold) * ratio <= headroom
        ]
        if not fits:
            return float("inf")
        return candidate.seconds * (self.fixed_seconds / fits[-1] + self.slope_seconds)


def _line(candidate: Candidate, hold: bool) -> str:
    return line_name(candidate.probe, hold=hold)
