"""The schedules worth considering, from each unit's cost on the meta device; those worth measuring; the fastest one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.parts import largest_parts
from snugfit._core.plan import FEWEST_NORM_IMAGES
from snugfit._core.profile import ProbeLine, Profile, UnitStats
from snugfit._core.workload import Workload
from snugfit.strategies.full_network import PLAIN_PROBE, batch_settings, network_cost
from snugfit.strategies.memory_estimates import TENSOR_TO_PROCESS, available_headroom
from snugfit.strategies.micro_batch import MicroBatching, hold_modes, line_name, probe_of_line
from snugfit.strategies.recomputation.dynamic_program import UnitCost, frontier, paged_bytes, schedule_cost
from snugfit.strategies.recomputation.module_costs import network_calls
from snugfit.strategies.recomputation.paging import Paging
from snugfit.strategies.recomputation.schedule import AnySchedule, Schedule, parse_schedule
from snugfit.strategies.recomputation.unit_costs import unit_costs

PREFIX = "checkpoint:"
PAGING = " pages "
HARDLY_MORE = 1.005
"""Ratio of bytes at the smallest batch below which two schedules are equally small."""
INTERMEDIATE = 5
"""Number of candidates between the schedule without recomputation and the schedule with the least memory."""
MARGIN_BYTES = 3_000_000
"""Margin for the headroom of a step, which may shrink while probes are measured. Measuring stops only once a schedule
fits with this margin."""

PROCESS_TO_TENSOR = 1.01
"""Typical process peak over tensor peak. A schedule that would fit only with less is not measured."""

MAX_TIME_RATIO = 0.95
"""A schedule is measured if its expected time is below this share of the time of the fastest one that fits."""

MEASURED_STEPS = 3
"""What measuring a schedule takes, in steps at each of its batch sizes: two of each, and its analysis."""


@dataclass(frozen=True)
class Candidate:
    """A schedule and its expected cost.

    Attributes:
        seconds: time of a step, relative to a step without recomputation.
        fixed_bytes: weights, buffers and optimizer state, and gradients of all weights if they are clipped.
        gradient_bytes: gradients of all weights, if they are in memory only while micro-batches hold them.
        sample_bytes: peak of feature maps and of gradients while they are applied, at the smallest trainable batch.
        batch_bytes: the same at the effective batch.
        paged_bytes: of an image, on disk or in the memory of a GPU's host.
    """

    schedule: AnySchedule
    seconds: float
    fixed_bytes: int
    gradient_bytes: int
    sample_bytes: int
    batch_bytes: int
    paged_bytes: int = 0

    @property
    def probe(self) -> str:
        """Name of its probe with gradients applied at once."""
        return probe_name(self.schedule, self.paged_bytes)

    def bytes_at(self, images: int, batch: int, *, hold: bool) -> int:
        """Tensor bytes at ``images`` of an effective batch, interpolated between one image and the batch."""
        share = (images - 1) / max(batch - 1, 1)
        activations = self.sample_bytes + share * (self.batch_bytes - self.sample_bytes)
        return int(self.fixed_bytes + activations + (self.gradient_bytes if hold else 0))


def probe_name(schedule: AnySchedule, paged: int = 0) -> str:
    """Name of the probe of a schedule that pages so many bytes of an image; the plain network's if it does neither."""
    if schedule.paged:
        return f"{PREFIX}{schedule}{PAGING}{paged}"
    return f"{PREFIX}{schedule}" if schedule.recomputes else PLAIN_PROBE


def schedule_of_probe(name: str, count: int) -> tuple[AnySchedule, int]:
    """The schedule, of ``count`` units, that a probe was measured with, and the bytes of an image that it pages."""
    if name == PLAIN_PROBE:
        return Schedule.keeping(count), 0
    text, _, paged = name.removeprefix(PREFIX).partition(PAGING)
    return parse_schedule(text), int(paged or 0)


def schedule_probes(names: Iterable[str]) -> list[str]:
    """Names of the schedules' probes among ``names``, without the suffix for held gradients."""
    probes = dict.fromkeys(map(probe_of_line, names))
    return [probe for probe in probes if probe == PLAIN_PROBE or probe.startswith(PREFIX)]


def find_candidates(
    chain: Chain, stats: Sequence[UnitStats], workload: Workload, paging: Paging | None = None
) -> list[Candidate]:
    """Schedules from the fastest, which recomputes nothing, to the one with the least memory.

    The candidates between these two are the fastest at memory limits that are evenly spaced on a logarithmic scale.
    The schedule with the least memory for the effective batch may not be the one with the least memory for few images,
    where the gradients of weights count more; those for a quarter of the batch and for the smallest trainable batch are
    candidates, too. The last candidate has the least memory at the smallest batch; among those that need hardly more,
    it is the one that needs least at the effective batch. With ``paging`` they may page.
    Those of a network that cannot be divided run modules again.
    """
    weights = 4 * sum(unit.parameters for unit in stats)
    fixed = sum(unit.weight_bytes for unit in stats) + int(weights * workload.optimizer.state_per_parameter)
    if workload.holds_gradients:
        fixed, weights = fixed + weights, 0
    batch = workload.effective_batch
    found = _of_modules(chain, batch) if chain.undivided else _of_units(chain, stats, batch, paging)
    candidates = [replace(each, fixed_bytes=fixed, gradient_bytes=weights) for each in found]
    most = HARDLY_MORE * min(each.fixed_bytes + each.sample_bytes for each in candidates)
    small = [each for each in candidates if each.fixed_bytes + each.sample_bytes <= most]
    least = min(small, key=lambda each: (each.batch_bytes, each.seconds))
    return sorted(candidates, key=lambda each: (each is least, each.seconds))


def _of_units(chain: Chain, stats: Sequence[UnitStats], batch: int, paging: Paging | None) -> Iterator[Candidate]:
    """Candidates without the bytes of weights and gradients."""
    full, some, few = (_costs(chain, stats, each, paging) for each in (batch, max(batch // 4, 1), 1))
    plain, _ = schedule_cost(Schedule.keeping(len(full)), full)
    fast = subsample(frontier(full, paging=paging is not None), full, INTERMEDIATE)
    for schedule in {*fast, *(frontier(costs, paging=paging is not None)[0] for costs in (some, few))}:
        (seconds, batch_bytes), (_, sample_bytes) = schedule_cost(schedule, full), schedule_cost(schedule, few)
        moved = -(-paged_bytes(schedule, full) // batch)
        yield Candidate(schedule, seconds / plain, 0, 0, sample_bytes, batch_bytes, moved)


def _of_modules(chain: Chain, batch: int) -> list[Candidate]:
    """The same for a network that cannot be divided."""
    costs = network_calls(chain).schedules()
    found = [Candidate(each, seconds, 0, 0, int(size), int(batch * size)) for each, seconds, size in costs]
    return [found[at] for at in spread([each.batch_bytes for each in found], INTERMEDIATE)]


def _costs(chain: Chain, stats: Sequence[UnitStats], batch: int, paging: Paging | None) -> list[UnitCost]:
    try:
        return unit_costs(chain, stats, batch, paging=paging)
    except ValueError:  # torch's BatchNorm refuses a single value per channel
        return unit_costs(chain, stats, batch + 1, paging=paging)


def subsample(schedules: Sequence[Schedule], costs: Sequence[UnitCost], between: int) -> list[Schedule]:
    """The first and the last schedule of a frontier and at most ``between`` others, the fastest first."""
    return [schedules[at] for at in spread([schedule_cost(schedule, costs)[1] for schedule in schedules], between)]


def spread(sizes: Sequence[int], between: int) -> list[int]:
    """Numbers of the last and the first of ascending sizes and at most ``between`` others, the largest first."""
    steps = between + 1
    limits = [sizes[-1] * (sizes[0] / sizes[-1]) ** (step / steps) for step in range(1, steps)]
    middle = [max(at for at, size in enumerate(sizes) if size <= max(limit, sizes[0])) for limit in limits]
    return list(dict.fromkeys((len(sizes) - 1, *middle, 0)))


def fastest_schedule(
    probes: Iterable[str],
    workload: Workload,
    profile: Profile,
    budget: Budget,
    *,
    accumulate: bool,
    norms: bool = False,
) -> tuple[str, MicroBatching] | None:
    """Probe and micro-batches of the fastest schedule at the largest effective batch of any; None if none fits.

    In a network with batch ``norms``, schedules whose micro-batches are too few images for them come last. ``probes``
    are names without the suffix for held gradients.
    """
    found: dict[tuple[int, bool, float], tuple[str, MicroBatching]] = {}
    for probe in probes:
        again = probe != PLAIN_PROBE
        micro = batch_settings(workload, profile, budget, probe, accumulate=accumulate, recomputes=again)
        if micro is not None:
            seconds = network_cost(profile, probe, workload, micro).seconds_per_epoch
            few = norms and _normalises_few(micro, workload)
            found.setdefault((-micro.images(workload), few, seconds), (probe, micro))
    return found[min(found)] if found else None


def _normalises_few(micro: MicroBatching, workload: Workload) -> bool:
    """Whether batch norms would normalise so few images together that accuracy is expected to suffer."""
    return micro.micro_batch < min(FEWEST_NORM_IMAGES, workload.effective_batch)


@dataclass(frozen=True)
class MeasurementFilter:
    """Decides which schedules are worth measuring.

    The last candidate has the least memory. ``left_bytes`` bounds the memory that one measurement leaves behind.
    Nothing is measured that takes longer than it saves in ``images`` of training, over all epochs. ``norms`` is
    whether the network has batch norms.
    """

    candidates: Sequence[Candidate]
    workload: Workload
    accumulate: bool
    left_bytes: int = 0
    images: float = math.inf
    norms: bool = False

    def is_worth_measuring(
        self, candidate: Candidate, hold: bool, tried: Mapping[str, ProbeLine | None], available: float
    ) -> bool:
        """Whether a candidate may fit and be faster than the measured ones; see :class:`snugfit.profiling.Probe`.

        While nothing fits the effective batch, the last candidate is always measured. Another one is measured only if
        the kernels that it leaves behind do not take the headroom that the last one needs. While what fits has too few
        images for batch norms, all that may fit with enough of them are measured. Then only the candidate with the
        least expected time is measured, if that saves more in training than measuring takes.
        """
        if _line(candidate, hold) in tried:
            return False
        headroom = available_headroom(available)
        lines = {name: line for name, line in tried.items() if line is not None}
        budget = Budget(None if available == float("inf") else max(int(available) - MARGIN_BYTES, 1))
        probes = [each.probe for each in self.candidates]
        found = fastest_schedule(
            probes, self.workload, Profile((), lines), budget, accumulate=self.accumulate, norms=self.norms
        )
        full = found is not None and found[1].images(self.workload) == self._batch
        few = found is not None and full and self.norms and _normalises_few(found[1], self.workload)
        images = min(FEWEST_NORM_IMAGES, self._batch) if few else 1
        least = candidate.bytes_at(images if hold else self._batch, self._batch, hold=hold)
        may_fit = least * PROCESS_TO_TENSOR <= headroom
        if found is None or not full or few:
            last = self.candidates[-1]
            needed = last.bytes_at(1, self._batch, hold=False) * TENSOR_TO_PROCESS + 2 * self.left_bytes
            return (candidate is last and not few) or (may_fit and needed <= headroom)  # its own kernels included
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
        If weights dominate the time of a step, a step of few images takes hardly less time than one of more images.
        Steps that recompute are expected to take as much longer than that as the quickest measured one of them does. A
        step's memory is its tensor bytes times the ratio of process peak to tensor bytes of the measured steps. Without
        a line of more than one point, there is no estimate.
        """
        named = {_line(each, hold): (each, hold) for each in self.candidates for hold in (False, True)}
        measured = [(*named[name], line) for name, line in lines.items() if name in named and line.points]
        sloped = next((found for found in measured if len(found[2].points) > 1), None)
        if sloped is None:
            return None
        reference, held, line = sloped
        times = reference.seconds * _passes(hold=held)

        def seconds_of_sample(each: Candidate, images: int) -> float:
            return each.seconds * (line.fixed_seconds / images + line.sample_seconds) / times

        fitting = self._fitting_images(measured, line.smallest_batch, headroom)
        slower = [
            own.seconds_at(images) / images / _passes(hold=hold) / seconds_of_sample(each, images)
            for each, hold, own in measured
            if each.schedule.recomputes and (images := fitting[each.probe, hold])
        ]
        expected = {}
        for each, hold in self._steps():
            images = fitting[each.probe, hold]
            seconds = seconds_of_sample(each, images) if images else math.inf
            expected[each.probe, hold] = seconds * (min(slower, default=1.0) if each.schedule.recomputes else 1.0)
        return expected

    def _fitting_images(
        self, measured: Sequence[tuple[Candidate, bool, ProbeLine]], smallest: int, headroom: float
    ) -> dict[tuple[str, bool], int]:
        """The most images at once that are expected to fit, by probe and hold; 0 if not even ``smallest`` do."""
        ratios = {
            hold: line.points[-1].peak_bytes / each.bytes_at(line.points[-1].batch, self._batch, hold=hold)
            for each, hold, line in measured
        }
        found = {}
        for each, hold in self._steps():
            sizes = largest_parts(self._batch)[:-1] if hold else (self._batch,)
            ratio = ratios.get(hold, max(ratios.values()))
            fits = (
                size
                for size in sizes
                if size >= smallest and each.bytes_at(size, self._batch, hold=hold) * ratio <= headroom
            )
            found[each.probe, hold] = max(fits, default=0)
        return found


def _passes(*, hold: bool) -> int:
    """Micro-batches that a measured step runs."""
    return 2 if hold else 1


def _line(candidate: Candidate, hold: bool) -> str:
    return line_name(candidate.probe, hold=hold)
