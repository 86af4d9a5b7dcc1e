"""Select the schedules that are worth measuring, and the fastest measured one within a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from snugfit._core.budget import Budget
from snugfit._core.parts import largest_parts
from snugfit._core.profile import ProbeLine, Profile
from snugfit._core.workload import Workload
from snugfit.strategies.checkpoint.candidates import Candidate
from snugfit.strategies.full_network import PLAIN_PROBE, batch_settings, network_cost
from snugfit.strategies.memory_estimates import TENSOR_TO_PROCESS, available_headroom
from snugfit.strategies.micro_batch import MicroBatching, hold_modes, line_name

MARGIN_BYTES = 3_000_000
"""Margin for the headroom of a step, which may shrink while probes are measured. Measuring stops only once a schedule
fits with this margin."""

PROCESS_TO_TENSOR = 1.01
"""Typical process peak over tensor peak. A schedule that would fit only with less is not measured."""

MAX_TIME_RATIO = 0.95
"""A schedule is measured if its expected time is below this share of the time of the fastest one that fits."""

MEASURED_STEPS = 3
"""What measuring a schedule takes, in steps at each of its batch sizes: two of each, and its analysis."""


def fastest_schedule(
    probes: Iterable[str], workload: Workload, profile: Profile, budget: Budget, *, accumulate: bool
) -> tuple[str, MicroBatching] | None:
    """Probe and micro-batches of the fastest schedule at the largest effective batch of any; None if none fits.

    ``probes`` are names without the suffix for held gradients.
    """
    found: dict[tuple[int, float], tuple[str, MicroBatching]] = {}
    for probe in probes:
        again = probe != PLAIN_PROBE
        micro = batch_settings(workload, profile, budget, probe, accumulate=accumulate, recomputes=again)
        if micro is not None:
            seconds = network_cost(profile, probe, workload, micro).seconds_per_epoch
            found.setdefault((-micro.images(workload), seconds), (probe, micro))
    return found[min(found)] if found else None


@dataclass(frozen=True)
class MeasurementFilter:
    """Decides which schedules are worth measuring.

    The last candidate has the least memory. ``left_bytes`` bounds the memory that one measurement leaves behind.
    Nothing is measured that takes longer than it saves in ``images`` of training, over all epochs.
    """

    candidates: Sequence[Candidate]
    workload: Workload
    accumulate: bool
    left_bytes: int = 0
    images: float = math.inf

    def is_worth_measuring(
        self, candidate: Candidate, hold: bool, tried: Mapping[str, ProbeLine | None], available: float
    ) -> bool:
        """Whether a candidate may fit and be faster than the measured ones; see :class:`snugfit.profiling.Probe`.

        While nothing fits the effective batch, the last candidate is always measured. Another one is measured only if
        the kernels that it leaves behind do not take the headroom that the last one needs. Once something fits, only
        the candidate with the least expected time is measured, if that saves more in training than measuring takes.
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
        if found is None or found[1].images(self.workload) != self._batch:
            last = self.candidates[-1]
            needed = last.bytes_at(1, self._batch, hold=False) * TENSOR_TO_PROCESS + 2 * self.left_bytes
            return candidate is last or (may_fit and needed <= headroom)  # its own kernels included
        expected = self._expected_seconds(lines, headroom - self.left_bytes)
        if expected is None:
            return may_fit
        mine = expected[candidate.probe, hold]
        untried = [expected[each.probe, held] for each, held in self._steps() if _line(each, held) not in tried]
        probe, micro = found
        line = lines[micro.line(probe)]
        sample_seconds = micro.seconds(line) / micro.micro_batch
        saved = (sample_seconds - mine) * self.images
        pays = saved > MEASURED_STEPS * sum(point.seconds for point in line.points)
        return mine <= min(untried) and mine < MAX_TIME_RATIO * sample_seconds and pays

    @property
    def _batch(self) -> int:
        return self.workload.effective_batch

    def _steps(self) -> list[tuple[Candidate, bool]]:
        """Candidates, with gradients applied at once and held."""
        return [(each, hold) for each in self.candidates for hold in hold_modes(self.accumulate)]

    def _expected_seconds(
        self, lines: Mapping[str, ProbeLine], headroom: float
    ) -> dict[tuple[str, bool], float] | None:
        """Expected seconds of a sample, by probe and hold, at the largest batch that fits; infinite if none fits.

        They follow a step's seconds, by its number of images, from the first measured line with more than one point.
        If weights dominate the time of a step, a step of few images takes hardly less time than one of more images. A
        step's memory is its tensor bytes times the ratio of process peak to tensor bytes of the measured steps. Without
        a line of more than one point, there is no estimate.
        """
        named = {_line(each, hold): (each, hold) for each in self.candidates for hold in (False, True)}
        measured = [(*named[name], line) for name, line in lines.items() if name in named and line.points]
        ratios = {
            hold: line.points[-1].peak_bytes / each.bytes_at(line.points[-1].batch, self._batch, hold=hold)
            for each, hold, line in measured
        }
        sloped = next((found for found in measured if len(found[2].points) > 1), None)
        if sloped is None:
            return None
        reference, held, line = sloped
        times = reference.seconds * (2 if held else 1)
        expected = {}
        for each, hold in self._steps():
            sizes = largest_parts(self._batch)[:-1] if hold else (self._batch,)
            ratio = ratios.get(hold, max(ratios.values()))
            fits = [
                size
                for size in sizes
                if size >= line.smallest_batch and each.bytes_at(size, self._batch, hold=hold) * ratio <= headroom
            ]
            seconds = line.fixed_seconds / times / fits[-1] + line.sample_seconds / times if fits else float("inf")
            expected[each.probe, hold] = each.seconds * seconds
        return expected


def _line(candidate: Candidate, hold: bool) -> str:
    return line_name(candidate.probe, hold=hold)
