"""Which measured schedule is the fastest in a budget, and which schedules are worth measuring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snugfit.core.budget import Budget
from snugfit.core.profile import ProbeLine, Profile
from snugfit.core.workload import Workload
from snugfit.strategies.checkpoint.choices import Way
from snugfit.strategies.prediction import TENSOR_TO_PROCESS, room_in
from snugfit.strategies.whole import batch_settings, divisors, held, whole_cost

MARGIN_BYTES = 3_000_000
"""By how much the room for a step may be smaller once everything is measured: what fits without it is measured on."""

ABOVE_TENSORS = 1.01
"""Process peak over tensor peak, as a rule: a schedule that would fit by less is not tried."""

ALIKE = 1.1
"""Expected times that differ by less than this factor are not told apart."""

WORTH_MEASURING = 0.95
"""A schedule is measured where it may take less than this share of the time of what is known to fit."""


@dataclass(frozen=True)
class Found:
    """A measured schedule at the batch that it would train at.

    Attributes:
        key: name of its probe.
        settings: ``micro_batch``, ``micro_batches`` and ``accumulate`` of the strategy.
        seconds: of an epoch.
    """

    key: str
    settings: dict[str, Any]
    seconds: float

    @property
    def batch(self) -> int:
        """The effective batch."""
        return int(self.settings["micro_batch"] * self.settings["micro_batches"])


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
        settings = batch_settings(workload, profile, budget, key, accumulate=accumulate)
        if settings is not None:
            cost = whole_cost(profile, key, workload, settings["micro_batch"], settings["micro_batches"])
            found.append(Found(key, settings, cost.seconds_per_epoch))
    return min(found, key=lambda each: (-each.batch, each.seconds), default=None)


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

    def needs(self, way: Way, hold: bool, lines: Mapping[str, ProbeLine], available: float) -> bool:
        """Whether a way may fit, and be faster than what was measured to fit; see :class:`snugfit.profiling.Probe`.

        Where nothing was found to fit the effective batch, the last way is wanted whatever is expected of it, and no
        other whose kernels, left behind, could take the room that the last one needs.
        """
        if _name(way, hold) in lines:
            return False
        room = room_in(available)
        may_fit = way.least_bytes(hold=hold) * ABOVE_TENSORS <= room
        profile = Profile((), dict(lines))
        budget = Budget(None if available == float("inf") else max(int(available) - MARGIN_BYTES, 1))
        keys = [each.key for each in self.ways]
        found = fastest(keys, self.workload, profile, budget, accumulate=self.accumulate)
        if found is not None and found.batch == self._batch:
            hoped = self._hoped(way, profile) < WORTH_MEASURING * found.seconds
            return may_fit and hoped and self._promises(way, hold, lines, room)
        last = self.ways[-1]
        needed = last.smallest_bytes * TENSOR_TO_PROCESS + 2 * self.left_bytes  # which the last one leaves behind, too
        return way is last or (may_fit and needed <= room)

    @property
    def _batch(self) -> int:
        return min(self.workload.batch_size, self.workload.train_count)

    def _promises(self, way: Way, hold: bool, lines: Mapping[str, ProbeLine], room: float) -> bool:
        """Whether it is expected to be about as fast as any, each at the largest batch that its tensors leave room for.

        A step of few images takes hardly less time than one of some more, where weights are what it is busy with.
        """
        plain = lines.get(self.ways[0].key)
        if plain is None or len(plain.points) < 2:
            return True
        expected = {
            (each.key, held_on): self._expected(each, held_on, plain, room)
            for each in self.ways
            for held_on in ((False, True) if self.accumulate else (False,))
        }
        return expected[way.key, hold] <= ALIKE * min(expected.values())

    def _expected(self, way: Way, hold: bool, plain: ProbeLine, room: float) -> float:
        """Seconds of an epoch, from the line of the network that recomputes nothing; infinite where it does not fit."""
        sizes = [size for size in divisors(self._batch)[:-1] if size >= plain.smallest_batch] if hold else [self._batch]
        fits = [each for each in sizes if way.bytes_at(each, self._batch, hold=hold) * ABOVE_TENSORS <= room]
        if not fits:
            return float("inf")
        step = plain.fixed_seconds + plain.sample_seconds * fits[-1]
        return step * way.seconds * self.workload.train_count / fits[-1]

    def _hoped(self, way: Way, profile: Profile) -> float:
        """Seconds of an epoch by a way at the whole batch, from lines of others; 0 where no line tells its slope."""
        seconds = []
        for each in self.ways:
            for hold in (False, True):
                line = profile.lines.get(_name(each, hold))
                if line is not None and len(line.points) > 1:
                    step = line.seconds_at(self._batch) / (2 if hold else 1)
                    made_up = ProbeLine(each.key, 0, 0, 0, 0, step * way.seconds / each.seconds / self._batch)
                    cost = whole_cost(Profile((), {each.key: made_up}), each.key, self.workload, self._batch, 1)
                    seconds.append(cost.seconds_per_epoch)
        return min(seconds, default=0.0)


def _name(way: Way, hold: bool) -> str:
    return held(way.key) if hold else way.key
