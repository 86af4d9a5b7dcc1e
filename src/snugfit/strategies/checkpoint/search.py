"""Which measured schedule is the fastest in a budget, and which schedules are worth measuring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from snugfit._core.budget import Budget
from snugfit._core.profile import ProbeLine, Profile
from snugfit._core.workload import Workload
from snugfit.strategies.checkpoint.candidates import Way
from snugfit.strategies.full_network import batch_settings, network_cost
from snugfit.strategies.memory_estimates import TENSOR_TO_PROCESS, available_headroom
from snugfit.strategies.micro_batch import MicroBatching, divisors, hold_modes, line_name

MARGIN_BYTES = 3_000_000
"""By how much a step's headroom may shrink once everything is measured: what fits without it is measured on."""

ABOVE_TENSORS = 1.01
"""Process peak over tensor peak, as a rule: a schedule that would fit by less is not tried."""

WORTH_MEASURING = 0.95
"""A schedule is measured where it may take less than this share of the time of what is known to fit."""


@dataclass(frozen=True)
class Found:
    """A measured schedule at the batch that it would train at.

    Attributes:
        key: name of its probe.
        micro: its micro-batches.
        seconds: of an epoch.
        sample_seconds: of a sample in a step.
    """

    key: str
    micro: MicroBatching
    seconds: float
    sample_seconds: float


def fastest(
    keys: Iterable[str], workload: Workload, profile: Profile, budget: Budget, *, accumulate: bool
) -> Found | None:
    """The fastest of those that train at the largest effective batch that any of them can; None where nothing fits.

    Args:
        keys: names of the probes of schedules, without those that hold gradients.
        workload, profile, budget: the question.
        accumulate: whether micro-batches may be accumulated.
    """
    found: list[Found] = []
    for key in keys:
        micro = batch_settings(workload, profile, budget, key, accumulate=accumulate)
        if micro is not None:
            cost = network_cost(profile, key, workload, micro)
            sample_seconds = micro.seconds(profile.lines[micro.line(key)]) / micro.micro_batch
            found.append(Found(key, micro, cost.seconds_per_epoch, sample_seconds))
    return min(found, key=lambda each: (-each.micro.effective_batch, each.seconds), default=None)


@dataclass(frozen=True)
class Wanted:
    """Judges which schedules are worth measuring.

    Attributes:
        ways: all schedules, that which takes the least memory last.
        workload: what is trained.
        accumulate: whether micro-batches may be accumulated.
        left_bytes: what measuring one leaves in memory, at the most.
    """

    ways: Sequence[Way]
    workload: Workload
    accumulate: bool
    left_bytes: int = 0

    def needs(self, way: Way, hold: bool, tried: Mapping[str, ProbeLine | None], available: float) -> bool:
        """Whether a way may fit, and be faster than what was measured to fit; see :class:`snugfit.profiling.Probe`.

        Where nothing was found to fit the effective batch, the last way is wanted whatever is expected of it, and no
        other whose kernels, left behind, could take the headroom that the last one needs. Once something fits, that is
        wanted of which most is expected.
        """
        if _name(way, hold) in tried:
            return False
        headroom = available_headroom(available)
        lines = {name: line for name, line in tried.items() if line is not None}
        budget = Budget(None if available == float("inf") else max(int(available) - MARGIN_BYTES, 1))
        keys = [each.key for each in self.ways]
        found = fastest(keys, self.workload, Profile((), lines), budget, accumulate=self.accumulate)
        known = Known.of(self.ways, lines, self._batch)
        may_fit = way.least_bytes(hold=hold) * ABOVE_TENSORS <= headroom
        if found is None or found.micro.effective_batch != self._batch:
            last = self.ways[-1]
            needed = last.smallest_bytes * TENSOR_TO_PROCESS + 2 * self.left_bytes  # which it leaves behind, too
            return way is last or (may_fit and needed <= headroom)
        if known is None:
            return may_fit
        untried = {
            (each.key, held_on): known.sample_seconds(each, held_on, self._sizes(held_on), headroom - self.left_bytes)
            for each in self.ways
            for held_on in hold_modes(self.accumulate)
            if _name(each, held_on) not in tried
        }
        expected = untried[way.key, hold]
        return expected <= min(untried.values()) and expected < WORTH_MEASURING * found.sample_seconds

    @property
    def _batch(self) -> int:
        return self.workload.effective_batch

    def _sizes(self, hold: bool) -> tuple[int, ...]:
        """Batches that a way may train at, smallest first."""
        return divisors(self._batch)[:-1] if hold else (self._batch,)


@dataclass(frozen=True)
class Known:
    """What lines that were measured tell of schedules that were not.

    Attributes:
        batch: the effective batch.
        fixed_seconds, slope_seconds: of a step that recomputes nothing: of any, and of each sample more.
        smallest_batch: that a step can be taken with.
        above: process peaks over tensor bytes, by whether gradients are held.
    """

    batch: int
    fixed_seconds: float
    slope_seconds: float
    smallest_batch: int
    above: Mapping[bool, float]

    @classmethod
    def of(cls, ways: Sequence[Way], lines: Mapping[str, ProbeLine], batch: int) -> Known | None:
        """From all lines; None where none of them has more than one point, which tells no slope."""
        named = {_name(way, hold): (way, hold) for way in ways for hold in (False, True)}
        above, sloped = {}, None
        for name, line in lines.items():
            if name not in named or not line.points:
                continue
            (way, hold), point = named[name], line.points[-1]
            above[hold] = point.peak_bytes / way.bytes_at(point.batch, batch, hold=hold)
            if sloped is None and len(line.points) > 1:
                sloped = line, way.seconds * (2 if hold else 1)
        if sloped is None:
            return None
        line, times = sloped
        return cls(batch, line.fixed_seconds / times, line.sample_seconds / times, line.smallest_batch, above)

    def sample_seconds(self, way: Way, hold: bool, sizes: Sequence[int], headroom: float) -> float:
        """Expected seconds of a sample, at the largest of some batches that fits; infinite if none fits.

        A step of few images takes hardly less time than one of some more, where weights are what it is busy with.
        """
        above = self.above.get(hold, max(self.above.values()))
        fits = [
            size
            for size in sizes
            if size >= self.smallest_batch and way.bytes_at(size, self.batch, hold=hold) * above <= headroom
        ]
        if not fits:
            return float("inf")
        return way.seconds * (self.fixed_seconds / fits[-1] + self.slope_seconds)


def _name(way: Way, hold: bool) -> str:
    return line_name(way.key, hold=hold)
