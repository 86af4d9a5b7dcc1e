"""Probes: run a part of a model at a few batch sizes, inside the cap, and fit a line through what it took.

NeuroFlux section 5.2, Profiler. Profiling knows nothing of what a probe is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from snugfit.core.profile import ProbeLine, ProbePoint, Profile
from snugfit.core.tensors import TensorProfile
from snugfit.memory import MemoryLimit, PeakMeter, fit_line, is_out_of_memory, release_memory
from snugfit.profiling.tensors import TensorProbe

FIRST_BATCHES = (2, 8)
FIRST_GROWTH, PROBE_GROWTH, LAYER_GROWTH = 3_000_000, 800_000, 80_000
"""What profiling leaves in memory (torch's caches, kernels), in all, for each network and for each of its layers after
the first: the base of a budget that holds the probes which this one refuses."""
ABOVE_FLOOR = 1.05
"""Process peak over tensor peak, at the least: measured 2-9 %."""
LONG_STEP_SECONDS = 0.3
"""A step that takes longer is not run twice: generating its kernels is a small part of it."""
LOOKING_BYTES = 64_000_000
"""Address space for looking at a network on the meta device, whose graph's code may be compiled: Python may crash where
it is refused memory for that, and no budget is too small to be told what would do. What is really taken counts as
everything does."""
Step = Callable[[int], object]


@dataclass(frozen=True)
class Probe:
    """Something whose bytes and seconds a strategy must know.

    Attributes:
        name: key of the line in the profile.
        build: makes everything that the step needs, weights and optimizer included, and returns the step: a function
            of the batch size that runs one complete training step on made-up data.
        floor: tensor bytes of a step at a batch size, known without allocating it (meta device).
        batch_limit: largest batch size of interest.
        kept_bytes: bytes that it holds between two steps: weights, buffers and optimizer state.
        sizes: batch sizes that may be chosen; any up to the limit when empty, and nothing but it where it is the only
            one: every size leaves kernels behind.
        layers: convolutions and linear layers in it, each of which leaves kernels behind.
        network: what it is a way of running: probes of one network leave its kernels behind once. One of its own where
            it is empty.
        needed: whether it is worth measuring, from the lines so far and the bytes available; always where it is None.
    """

    name: str
    build: Callable[[], Step]
    floor: Callable[[int], int]
    batch_limit: int
    kept_bytes: int = 0
    sizes: tuple[int, ...] = ()
    layers: int = 1
    network: str = ""
    needed: Callable[[Mapping[str, ProbeLine], float], bool] | None = None

    @property
    def growth_bytes(self) -> int:
        """What measuring it leaves in memory, as a rule; what was measured of the same network before is no more."""
        return PROBE_GROWTH + (self.layers - 1) * LAYER_GROWTH


def measure_probes(
    probes: Sequence[Probe | TensorProbe],
    meter: PeakMeter,
    limit: MemoryLimit,
    on_measured: Callable[[str, int, int], object] | None = None,
) -> Profile:
    """Measure probes one at a time; returns a profile without unit facts.

    Args:
        probes: what to measure.
        meter: memory above the baseline.
        limit: the memory budget, in force.
        on_measured: told the name, number (from 1) and count of every finished probe; None takes the floors alone.
    """
    started = time.perf_counter()
    meter.restart()
    before = meter.current_bytes
    lines: dict[str, ProbeLine] = {}
    floors: dict[str, int] = {}
    tensors: TensorProfile | None = None
    lined: list[Probe] = []
    for index, probe in enumerate(probes, start=1):
        if isinstance(probe, TensorProbe):
            if on_measured is not None:
                tensors = probe.measure(limit)
                on_measured(probe.name, index, len(probes))
            continue
        with limit.loosened(LOOKING_BYTES):
            if not _is_needed(probe, lines, meter, limit):
                continue
            lined.append(probe)
            smallest, floors[probe.name] = smallest_floor(probe)
        if on_measured is None:
            continue
        line = measure_probe(probe, meter, limit, smallest, floors[probe.name])
        if line is not None:
            lines[probe.name] = line
        on_measured(probe.name, index, len(probes))
    release_memory()
    meter.restart()
    grown = 0
    if len(lines) < len(lined):
        known = {probe.network for probe in lined if probe.name in lines}
        left = _growth([probe for probe in lined if probe.network and probe.network not in known])
        grown = max(before + FIRST_GROWTH + _growth(lined), meter.current_bytes + 2 * left)  # at two batch sizes
    return Profile(
        units=(),
        lines=lines,
        floors=floors,
        kept={probe.name: probe.kept_bytes for probe in lined},
        base_bytes=max(meter.current_bytes, grown, 0),
        seconds=time.perf_counter() - started,
        tensors=tensors,
    )


def _is_needed(probe: Probe, lines: Mapping[str, ProbeLine], meter: PeakMeter, limit: MemoryLimit) -> bool:
    """Whether a probe is worth measuring; asked again where looking, which leaves memory behind, found that it is."""
    if probe.needed is None:
        return True
    meter.restart()
    if not probe.needed(lines, _available(meter, limit)):
        return False
    release_memory()
    meter.restart()
    return probe.needed(lines, _available(meter, limit))


def _growth(probes: Sequence[Probe]) -> int:
    """What measuring all of them leaves in memory: every network counts once, with the most that any way of it does."""
    networks: dict[str, int] = {}
    for probe in probes:
        network = probe.network or probe.name
        networks[network] = max(networks.get(network, 0), probe.growth_bytes)
    return sum(networks.values())


def _available(meter: PeakMeter, limit: MemoryLimit) -> float:
    """Bytes of the budget that are free; infinite without one."""
    return float("inf") if limit.budget_bytes is None else float(limit.budget_bytes - meter.current_bytes)


def smallest_floor(probe: Probe) -> tuple[int, int]:
    """Fewest samples that the probe can train on, and its tensor bytes at them."""
    try:
        return 1, probe.floor(1)
    except ValueError:  # torch's BatchNorm refuses a single value per channel
        return 2, probe.floor(2)


def measure_probe(
    probe: Probe, meter: PeakMeter, limit: MemoryLimit, smallest_batch: int = 1, floor_bytes: int | None = None
) -> ProbeLine | None:
    """Measure one probe at two small batch sizes and at the largest that the budget is then expected to hold.

    Args:
        probe: what to measure.
        meter: memory above the baseline.
        limit: the memory budget, in force.
        smallest_batch: fewest samples that it can train on.
        floor_bytes: its floor at them, where that is known.

    Returns:
        The fitted line, or None when not even the smallest batch fits.
    """
    release_memory()
    meter.restart()
    available = _available(meter, limit)
    floor_bytes = _floor(probe, smallest_batch, limit) if floor_bytes is None else floor_bytes
    if floor_bytes > available:
        return None
    attempt = _Attempt(probe, meter, limit, available, smallest_batch, floor_bytes)
    attempt.run()
    del attempt.step
    release_memory()
    meter.restart()
    resting = meter.current_bytes
    points = [
        ProbePoint(batch, max(peak - resting, attempt.built, 1), seconds) for batch, peak, seconds in attempt.measured
    ]
    return _fit(probe, points, smallest_batch, limit) if points else None


def _floor(probe: Probe, batch: int, limit: MemoryLimit) -> int:
    with limit.loosened(LOOKING_BYTES):
        return probe.floor(batch)


def _fit(probe: Probe, points: list[ProbePoint], smallest_batch: int, limit: MemoryLimit) -> ProbeLine:
    """Fit the line; where only small batches could be run, it must not promise less than the largest one's tensors.

    A single point says nothing of smaller batches, which are then not offered: a single sample is not measured beside
    two, since kernels for one sample may take more memory, and keep it.
    """
    smallest_batch = max(smallest_batch, points[0].batch) if len(points) == 1 else smallest_batch
    line, most = fit_line(probe.name, points, smallest_batch), probe.batch_limit
    if points[-1].batch < most and line.bytes_at(most) < (floor := _floor(probe, most, limit)):
        made_up = ProbePoint(most, floor, line.seconds_at(most))
        line = replace(fit_line(probe.name, [*points, made_up], smallest_batch), points=line.points)
    return line


class _Attempt:
    """One probe being measured; ``measured`` holds batch sizes, absolute peaks above the baseline, and seconds.

    ``built`` is what building took: more than a step does where weights come larger than they are stored.
    """

    def __init__(
        self,
        probe: Probe,
        meter: PeakMeter,
        limit: MemoryLimit,
        available: float,
        smallest_batch: int,
        floor_bytes: int,
    ) -> None:
        self.probe, self.meter, self.limit, self.available = probe, meter, limit, available
        self.smallest_batch, self.sample_floor = smallest_batch, floor_bytes / smallest_batch
        self.measured: list[tuple[int, int, float]] = []
        self.step: Step | None = None
        self.built = 0

    def run(self) -> None:
        """Measure at two small batch sizes, then at the one where the probe would work; at that alone where it must."""
        before = self.meter.current_bytes
        try:
            with self.limit.room_for_kernels():
                self.step = self.probe.build()
            self.built = self.meter.mark() - before
        except (RuntimeError, MemoryError, SystemError) as error:
            if not is_out_of_memory(error):
                raise
            return
        limit = self.probe.batch_limit
        sizes = [batch for batch in FIRST_BATCHES if self.smallest_batch <= batch < limit]
        if len(sizes) < len(FIRST_BATCHES):
            sizes.append(limit)  # a single point would say nothing of it
        if len(self.probe.sizes) == 1:
            sizes = [*self.probe.sizes]
        for batch in sizes:
            if self._is_hopeless(batch, before) or not self._measure(batch):
                break
        if not self.measured and len(self.probe.sizes) != 1:
            self._measure(self.smallest_batch)
        elif len(self.measured) == len(sizes):
            self._measure_largest(before)

    def _is_hopeless(self, batch: int, before: int) -> bool:
        """Whether a batch is not worth trying: a refused step leaves memory behind, which the next ones lack."""
        most = self.measured[-1][1] - before if self.measured else self.sample_floor * batch / 2
        if batch == self.smallest_batch or 2 * most + self.limit.kernel_bytes < self.available:
            return False
        return _floor(self.probe, batch, self.limit) * ABOVE_FLOOR + self.limit.kernel_bytes > self.available

    def _measure_largest(self, before: int) -> None:
        line = fit_line(self.probe.name, [ProbePoint(b, peak - before, s) for b, peak, s in self.measured])
        largest = line.largest_batch(self.available - self.limit.kernel_bytes, self.probe.batch_limit)
        while largest > self.measured[-1][0]:
            if self._measure(self._allowed(largest)):
                return
            largest = int(largest * 0.8)

    def _allowed(self, batch: int) -> int:
        return max((size for size in self.probe.sizes if size <= batch), default=batch)

    def _measure(self, batch: int) -> bool:
        """Run one step and, where that was the first of all or a short one, another that counts.

        The first step of all has no optimizer state yet; the first on a new shape generates kernels, which takes some
        hundredths of a second.
        """
        step = self.step
        if step is None:
            return False
        self.meter.restart()
        try:
            with self.limit.room_for_kernels():
                seconds = _timed(step, batch)
            if not self.measured or seconds < LONG_STEP_SECONDS:
                self.meter.restart()
                seconds = _timed(step, batch)
        except (RuntimeError, MemoryError, SystemError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            self.measured.append((batch, self.meter.mark(), seconds))
            return True
        release_memory()
        return False


def _timed(step: Step, batch: int) -> float:
    started = time.perf_counter()
    step(batch)
    return time.perf_counter() - started
