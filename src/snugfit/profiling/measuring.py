"""Measure many probes, one at a time; identical probes are measured once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from snugfit import _meta_device
from snugfit._core.profile import ProbeLine, Profile, TensorProfile
from snugfit._stopwatch import Stopwatch
from snugfit.memory import MemoryLimit, PeakMeter, release_memory
from snugfit.profiling.measurement_cache import Measurement, Measurements
from snugfit.profiling.probe import META_PASS_BYTES, Floors, MappingCost, Probe, available_bytes, measure_probe

if TYPE_CHECKING:
    from snugfit.profiling.tensors import TensorProbe

FIRST_GROWTH = 3_000_000
"""Lower bound on the memory that profiling leaves, in addition to that of the probes (:func:`alone`)."""
STARTED_GROWTH = 1_000_000
"""Memory that a process takes in which nothing is measured, from a run's files to its first batch."""
ALMOST_ALL = 0.95
"""Share of a batch size's kernels from which what a probe left counts as all of them: two processes differ a little."""


def measure_probes(
    probes: Sequence[Probe | TensorProbe],
    meter: PeakMeter,
    limit: MemoryLimit,
    on_measured: Callable[[str, int, int], object] | None = None,
    known: Measurements | None = None,
) -> Profile:
    """Measure probes one at a time; returns a profile without unit statistics and the shapes of tensors.

    Args:
        probes: the probes.
        meter: memory above the baseline.
        limit: the memory budget, in force.
        on_measured: called with name, number (from 1) and count after each probe; without it only floors are computed.
        known: earlier measurements; new ones are added.
    """
    started = time.perf_counter()
    session = _Session(meter, limit, known or Measurements(), measures=on_measured is not None)
    numbers = {id(probe): number for number, probe in enumerate(probes, start=1)}
    for probe in session.measured(probes):
        if on_measured is not None:
            on_measured(probe.name, numbers[id(probe)], len(probes))
    return session.profile(time.perf_counter() - started)


@dataclass
class _Session:
    """Probes being measured, or only their floors; results so far.

    Attributes:
        tried: the lines found so far; None for a probe that did not fit.
        left: by probe, bytes that measuring it left, here or in another process.
        elsewhere: by key, bytes that measuring left in another process.
        expected: those of ``left`` that were left in another process, and that training will leave here too: training
            runs at one batch size, measuring at several.
        delay_seconds: that other processes added to measuring on a processor.
        mapping: what mapping memory has cost in this process.
    """

    meter: PeakMeter
    limit: MemoryLimit
    known: Measurements
    measures: bool
    tried: dict[str, ProbeLine | None] = field(default_factory=dict)
    floors: dict[str, int] = field(default_factory=dict)
    lined: list[Probe] = field(default_factory=list)
    tensors: TensorProfile | None = None
    left: dict[str, int] = field(default_factory=dict)
    elsewhere: dict[str, int] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    delay_seconds: float = 0.0
    mapping: MappingCost = field(default_factory=MappingCost)
    _judged_bytes: float | None = None

    def __post_init__(self) -> None:
        self.meter.restart()
        self.before = self.meter.current_bytes

    def measured(self, probes: Sequence[Probe | TensorProbe]) -> Iterator[Probe | TensorProbe]:
        """Measure probes in order, of any shapes.

        A probe not needed yet is checked again after each lazy one, and at the end.
        """
        declined: list[Probe] = []
        for probe in probes:
            if not isinstance(probe, Probe):
                self._take_tensors(probe)
            elif not self._take(probe):
                declined.append(probe)
                continue
            yield probe
            if isinstance(probe, Probe) and probe.needed is not None:
                yield from self._needed_now(declined)
        yield from self._needed_now(declined)

    def _needed_now(self, declined: list[Probe]) -> Iterator[Probe]:
        """Measure those of the probes that are needed by now, and take them off the list.

        All are judged by the same available memory: some are needed only if others are not, so that with a different
        amount for each, none might be.
        """
        while declined:
            judged_bytes = self._judged()
            found = next(filter(self._take, declined), None)
            if found is not None:
                declined.remove(found)
                yield found
            elif self._judged_bytes == judged_bytes:
                return

    def _take(self, probe: Probe) -> bool:
        """Measure a probe if it is needed; returns whether it was."""
        if not self._is_needed(probe):
            return False
        available = self._available()
        found = self.known.find(probe.same, available)
        floors = Floors(probe.floor, self.limit, {int(b): size for b, size in found.floors.items()} if found else {})
        self.lined.append(probe)
        self._judged_bytes = None
        self.floors[probe.name] = floors.smallest()[1]
        self.tried[probe.name] = None
        if not self.measures:
            return True

        def measure() -> Measurement:
            line = measure_probe(probe, self.meter, self.limit, floors, self.mapping)
            complete = line is not None and line.points[-1].batch >= probe.batch_limit
            return Measurement(line=line, floors={str(b): size for b, size in floors.known.items()}, complete=complete)

        line = self._measured(probe, found, available, measure).line
        if line is not None:
            elsewhere = self.known.is_from_disk(probe.same) and not self._has_kernels(line, probe)
            self.tried[probe.name] = replace(line, name=probe.name, elsewhere=elsewhere)
        return True

    def _has_kernels(self, line: ProbeLine, probe: Probe) -> bool:
        """Whether the base counts the kernels of the only batch size that another process measured."""
        return _counts_kernels(line, probe, self.expected.get(probe.name, 0))

    def _take_tensors(self, probe: TensorProbe) -> None:
        """Measure every operator of a network, for tensors of any shape."""
        if not self.measures:
            return

        def measure() -> Measurement:
            tensors = probe.measure(self.limit)
            return Measurement(tensors=tensors, complete=tensors is not None and tensors.batch >= probe.batch_limit)

        self._judged_bytes = None
        available = self._available_now()
        self.tensors = self._measured(probe, self.known.find(probe.same, available), available, measure).tensors

    def _measured(
        self,
        probe: Probe | TensorProbe,
        found: Measurement | None,
        available: float,
        measure: Callable[[], Measurement],
    ) -> Measurement:
        """The known result of a probe, or else a new measurement, which is stored."""
        if found is None:
            before = self._in_memory()
            with Stopwatch() as stopwatch:
                found = measure()
            if self.limit.device.type == "cpu":
                self.delay_seconds += stopwatch.delay
            found = replace(found, left_bytes=max(self._in_memory() - before, 0))
            self.known.keep(probe.same, found, available)
            self._add(self.left, probe, found.left_bytes)
        elif self.known.is_from_disk(probe.same) and probe.same not in self.elsewhere:
            self.elsewhere[probe.same] = found.left_bytes
            self._add(self.left, probe, found.left_by_one_size)
            self._add(self.expected, probe, found.left_by_one_size)
        return found

    @staticmethod
    def _add(to: dict[str, int], probe: Probe | TensorProbe, size: int) -> None:
        to[probe.name] = to.get(probe.name, 0) + size

    def profile(self, seconds: float) -> Profile:
        """The results."""
        _meta_device.forget()
        self._count_kernels_once()
        lines = {name: line for name, line in self.tried.items() if line is not None}
        return Profile(
            units=(),
            lines=lines,
            floors=self.floors,
            kept={probe.name: probe.kept_bytes for probe in self.lined},
            base_bytes=max(self._in_memory() + sum(self.expected.values()), 0),
            start_bytes=max(self.before, 0),
            left=self.left,
            expected=self.expected,
            seconds=seconds,
            delay_seconds=self.delay_seconds,
            tensors=self.tensors,
        )

    def _count_kernels_once(self) -> None:
        """Take off what training is expected to leave here those kernels that measuring another probe has left."""
        for probe in self.lined:
            if not probe.kernels or probe.name in self.expected:
                continue
            for other in self.lined:
                if other.kernels == probe.kernels and self._ran_at_the_size_of(probe, other):
                    shared = min(self.expected[other.name], self.left.get(probe.name, 0))
                    self.expected[other.name] -= shared
                    self.left[other.name] -= shared

    def _ran_at_the_size_of(self, here: Probe, elsewhere: Probe) -> bool:
        """Whether a probe ran at the only size of another one: one that was refused ran at the smallest."""
        line, other = self.tried[here.name], self.tried[elsewhere.name]
        if elsewhere.name not in self.expected or other is None or len(other.points) != 1:
            return False
        sizes = {other.smallest_batch} if line is None else {point.batch for point in line.points}
        return other.points[0].batch in sizes

    def _in_memory(self) -> int:
        release_memory()
        self.meter.restart()
        return self.meter.current_bytes

    def _is_needed(self, probe: Probe) -> bool:
        """Whether a probe is worth measuring; checked again after its floor is computed, which leaves memory behind."""
        if probe.needed is None:
            return True
        with self.limit.allow_address_space(META_PASS_BYTES):
            judged_bytes = self._judged()
            if not probe.needed(self.tried, judged_bytes):
                return False
            release_memory()
            self._judged_bytes = min(judged_bytes, self._available_now())
            return probe.needed(self.tried, self._judged_bytes)

    def _judged(self) -> float:
        """The available memory by which probes are judged until another one is measured."""
        if self._judged_bytes is None:
            self._judged_bytes = self._available_now()
        return self._judged_bytes

    def _available_now(self) -> float:
        self.meter.restart()
        return self._available()

    def _available(self) -> float:
        """Bytes that would be free if everything had been measured in this process."""
        return available_bytes(self.meter, self.limit) - sum(self.elsewhere.values())


def without_others(profile: Profile, probes: Sequence[Probe | TensorProbe]) -> Profile:
    """The profile with the base of a process that trains what these probes measure.

    What other probes have left in another process does not count to it.
    """
    names = {probe.name for probe in probes}
    others = sum(size for name, size in profile.expected.items() if name not in names)
    return replace(profile, base_bytes=max(profile.base_bytes - others, 0))


def in_fresh_process(profile: Profile, probes: Sequence[Probe | TensorProbe], resting_bytes: int) -> Profile:
    """The profile with the base of a process that trains what these probes measure, and has measured nothing.

    Its base is ``resting_bytes``, with data and network in memory, and what training leaves at one batch size. Kernels
    of other sizes, and what measuring allocated in the heap and cannot return, are not part of it. A process generates
    a kernel once, so kernels of these probes may have been left by those before them: the most of one of those counts.
    """
    own = {probe.name for probe in probes}
    others = (
        _left_by_one_size(profile, name) + (profile.lines[name].shape_bytes if name in profile.lines else 0.0)
        for name in takewhile(lambda name: name not in own, profile.left)
    )
    base = resting_bytes + STARTED_GROWTH + int(max(others, default=0))
    return _measured_elsewhere(profile, probes, base)


def in_next_process(profile: Profile, probes: Sequence[Probe | TensorProbe]) -> Profile:
    """The profile of a process that trains what these probes measure, and finds all measurements in the cache."""
    return _measured_elsewhere(profile, probes, profile.base_bytes - sum(profile.left.values()))


def _measured_elsewhere(profile: Profile, probes: Sequence[Probe | TensorProbe], base_bytes: int) -> Profile:
    """The profile of a process that has measured nothing; to its base, add what training leaves at one batch size."""
    lines = dict(profile.lines)
    for probe in probes:
        line = lines.get(probe.name)
        if line is not None and isinstance(probe, Probe):
            has = _counts_kernels(line, probe, _left_by_one_size(profile, probe.name))
            lines[probe.name] = replace(line, elsewhere=not has)
    left = sum(_left_by_one_size(profile, name) for name in {probe.name for probe in probes})
    return replace(profile, lines=lines, base_bytes=max(base_bytes + left, 0), expected={})


def _left_by_one_size(profile: Profile, name: str) -> int:
    """What measuring a probe left, without the kernels of all batch sizes but one."""
    line = profile.lines.get(name)
    by_size = 0 if line is None or name in profile.expected else int(line.sizes_bytes)
    return max(profile.left.get(name, 0) - by_size, 0)


def _counts_kernels(line: ProbeLine, probe: Probe, left_bytes: int) -> bool:
    """Whether what a probe left in another process has all kernels of the only batch size that it was measured at."""
    return bool(probe.kernels) and len(line.points) == 1 and left_bytes >= ALMOST_ALL * line.shape_bytes


def alone(profile: Profile, probes: Sequence[Probe | TensorProbe]) -> Profile:
    """The profile with the base of a process, and of a budget, in which these probes alone are measured, and all fit.

    What other probes have left in memory does not count to it; a larger budget also measures what this one refused.
    """
    names = {probe.name for probe in probes}
    resting = profile.base_bytes - sum(left for name, left in profile.left.items() if name not in names)
    lined = [probe for probe in probes if isinstance(probe, Probe) and probe.name in profile.floors]
    measured = [probe for probe in lined if probe.name in profile.lines]
    base = resting
    if len(measured) < len(lined):
        networks = {probe.network for probe in measured}
        new = growth([probe for probe in lined if probe.network and probe.network not in networks])
        base = max(profile.start_bytes + FIRST_GROWTH + growth(lined), resting + 2 * new)  # at two batch sizes
    return replace(profile, base_bytes=max(base, 0))


def growth(probes: Sequence[Probe]) -> int:
    """Bytes that measuring all probes leaves in memory: every network counts once, with its largest amount."""
    networks: dict[str, int] = {}
    for probe in probes:
        network = probe.network or probe.name
        networks[network] = max(networks.get(network, 0), probe.growth_bytes)
    return sum(networks.values())
