"""Probes: run a part of a model at a few batch sizes, within the limit, and fit a line to its bytes and seconds.

NeuroFlux section 5.2, Profiler. Profiling does not know the purpose of a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from snugfit._core.own_cores import on_own_core
from snugfit._core.profile import HeapUse, ProbeLine, ProbePoint
from snugfit._stopwatch import Stopwatch
from snugfit.errors import MEMORY_ERRORS
from snugfit.memory import MemoryLimit, PeakMeter, fit_line, is_out_of_memory, release_memory, trim_heap
from snugfit.memory.device import has_own_memory, release_devices, synchronize
from snugfit.memory.process import PageMapping

FIRST_BATCHES = (2, 8)
PROBE_GROWTH, LAYER_GROWTH = 800_000, 80_000
"""Bytes that profiling leaves in memory (torch's caches, kernels) for a network, and for each layer after the first."""
ABOVE_FLOOR = 1.05
"""Lower bound on the ratio of process peak to tensor peak: measured 2-9 % more."""
LONG_STEP_SECONDS, LONG_LAYER_SECONDS = 0.15, 0.02
"""A step that takes longer than the first, and than the second for each layer, runs only once on a new batch size,
because generating its kernels takes a small part of it (2 ms for a layer of MobileNetV2), ..."""
FEW_KERNELS = 0.01
"""... unless these kernels take more than this share of its peak. A step has all kernels when it begins, except for the
first: MobileNetV2 at 16 images generates 4.6 MB of them, 2.9 MB after its peak. Fewer kernels are added to the peak."""
LONGEST_STEP_SECONDS = 1.0
"""No longer step of a part of a network is run to refine a line, ..."""
FARTHEST = 4
"""... unless the batch to be used is larger than the largest measured batch by more than this factor."""
FAR_ENOUGH = 1.5
"""A batch that is measured in place of one that takes too long must be larger than the last one by this factor. Batches
beyond this factor, which did not fit beside what measuring leaves, are bounded by their tensors."""
MORE_ROOM = 1.25
"""Training may have more room than measuring, which leaves kernels of several batch sizes in memory."""
BEYOND_MEASURED = 0.2
"""Share added to the tensor bytes by which a step at a larger batch exceeds one at the largest measured batch. It was
up to 0.17 (VGG-8, from 14 to 45 images), because some operators take workspace at larger batches only."""
META_PASS_BYTES = 64_000_000
"""Address space for running a network on the meta device, whose graph's code may be compiled.

Python may crash if it is refused memory for that, and the smallest possible budget must be reported for any budget. The
memory that is really used counts as usual.
"""
LONG_MAPPING_SECONDS, LEAST_MAPPING_SECONDS = 0.5, 0.02
"""Seconds of mapping memory that are measured well enough in one step, and in all steps of a process together: the
system counts them in ticks of 4 or 10 ms."""
MAPPING_FACTOR, MAPPING_FACTOR_OF_THREADS = 1.1, 1.3
"""Time that mapping memory takes over what the system counts for it in the computing thread: new pages are slow to
write, and of several threads each waits for the others."""
MOST_MAPPING = 0.9
"""Largest share of a step's seconds that counts as mapping memory: beside other processes the two are less certain."""
Step = Callable[[int], object]


@dataclass(frozen=True)
class Probe:
    """A part of a model whose bytes and seconds a strategy must know.

    Attributes:
        name: key of the line in the profile.
        build: creates everything that the step needs, including weights and optimizer, and returns the step: a function
            of the batch size that runs one complete training step on synthetic data.
        floor: tensor bytes of a step at a batch size, computed without allocation (meta device).
        batch_limit: largest batch size of interest.
        kept_bytes: bytes between two steps: weights, buffers and optimizer state.
        sizes: allowed batch sizes; any up to the limit if empty. A single one is measured alone, because every size
            leaves kernels behind.
        layers: number of convolutions and linear layers, each of which leaves kernels behind.
        network: the network that it runs: probes of one network leave its kernels behind once. An empty text is a
            network of its own.
        kernels: probes with equal texts generate the same kernels at a batch size. An empty text equals no other.
        same: the computation as text: probes with equal texts cost the same, and are measured once. An empty text
            equals no other.
        shared: whether it is the same in every strategy that has a probe of its name.
        partial_bytes: workspace that only some batch sizes need, multiples of the number of threads among them.
        warm_up: whether the first step at a batch size does not represent the next ones, however long it is.
        longest_seconds: no step that is expected to take longer is run to refine the line, unless the batch to be used
            is far larger than the largest measured one.
        heap: how much freed memory the heap keeps in training, which saves time for mapping memory.
        headroom: bytes that a step in training may take, from those available and those that a new batch size leaves;
            the largest batch is measured where training would use it. All but those of kernels if None.
        needed: whether it is worth measuring, from the lines so far, with None for probes that did not fit, and the
            bytes available; always if None. It is checked again after other measurements.
    """

    name: str
    build: Callable[[], Step]
    floor: Callable[[int], int]
    batch_limit: int
    kept_bytes: int = 0
    sizes: tuple[int, ...] = ()
    layers: int = 1
    network: str = ""
    kernels: str = ""
    same: str = ""
    shared: bool = False
    partial_bytes: int = 0
    warm_up: bool = False
    longest_seconds: float = LONGEST_STEP_SECONDS
    heap: HeapUse = "layers"
    headroom: Callable[[float, float], float] | None = None
    needed: Callable[[Mapping[str, ProbeLine | None], float], bool] | None = None

    @property
    def growth_bytes(self) -> int:
        """Typical bytes that measuring it leaves in memory; less if the same network was measured before."""
        return PROBE_GROWTH + (self.layers - 1) * LAYER_GROWTH


def smallest_floor(look: Callable[[int], int]) -> tuple[int, int]:
    """Fewest samples that a probe can train on, and its tensor bytes at them."""
    try:
        return 1, look(1)
    except ValueError:  # torch's BatchNorm refuses a single value per channel
        return 2, look(2)


class Floors:
    """Tensor bytes of a probe's step by batch size. ``look`` takes up to a second, so it is rarely called."""

    def __init__(self, look: Callable[[int], int], limit: MemoryLimit, known: dict[int, int] | None = None) -> None:
        self._look, self._limit = look, limit
        self.known = dict(known or {})

    def at(self, batch: int) -> int:
        """Tensor bytes at a batch size."""
        if batch not in self.known:
            with self._limit.allow_address_space(META_PASS_BYTES):
                self.known[batch] = self._look(batch)
        return self.known[batch]

    def smallest(self) -> tuple[int, int]:
        """Fewest samples that the probe can train on, and its tensor bytes at them."""
        if 1 not in self.known and 2 in self.known:
            return 2, self.known[2]  # it was looked at before
        return smallest_floor(self.at)

    def below(self, batch: int, most: int) -> int:
        """Upper bound on tensor bytes at a batch size: a line between those of the smallest and the largest batch.

        A step's peak is the largest of many amounts that grow linearly with the batch, so no size in between needs more
        than the line.
        """
        fewest, least = self.smallest()
        if batch <= fewest or most <= fewest or batch >= most:
            return self.at(max(batch, fewest))
        return least + -(-(self.at(most) - least) * (batch - fewest) // (most - fewest))


def available_bytes(meter: PeakMeter, limit: MemoryLimit) -> float:
    """Bytes of the budget that are free; infinite without one."""
    return float("inf") if limit.budget_bytes is None else float(limit.budget_bytes - meter.current_bytes)


class MappingCost:
    """What mapping memory has cost in all steps that a process measured: a page costs as much in each of them."""

    def __init__(self) -> None:
        self._all = PageMapping(0.0, 0)

    def add(self, own: PageMapping) -> None:
        """Count a step."""
        self._all = PageMapping(self._all.seconds + own.seconds, self._all.pages + own.pages)

    def seconds(self, own: PageMapping) -> float:
        """Seconds of a step for mapping memory: of a short one, its pages' share of those of all steps."""
        factor = MAPPING_FACTOR if torch.get_num_threads() == 1 else MAPPING_FACTOR_OF_THREADS
        if own.seconds >= LONG_MAPPING_SECONDS:
            return factor * own.seconds
        measured = self._all.seconds >= LEAST_MAPPING_SECONDS
        return factor * self._all.seconds * own.pages / self._all.pages if measured else 0.0


def measure_probe(
    probe: Probe,
    meter: PeakMeter,
    limit: MemoryLimit,
    floors: Floors | None = None,
    mapping: MappingCost | None = None,
) -> ProbeLine | None:
    """Measure one probe at two small batch sizes and at the largest that the budget is then predicted to hold.

    Where the second small one does not fit, the largest below it that does is measured instead.

    Args:
        probe: the probe.
        meter: memory above the baseline.
        limit: the memory budget, in force.
        floors: its known floors.
        mapping: what mapping memory has cost in this process.

    Returns:
        The fitted line, or None if not even the smallest batch fits.
    """
    floors = floors or Floors(probe.floor, limit)
    release_memory()
    meter.restart()
    before, available = meter.current_bytes, available_bytes(meter, limit)
    if floors.smallest()[1] > available:
        return None
    attempt = _Attempt(probe, meter, limit, available, floors, mapping or MappingCost())
    attempt.run()
    trim_heap()
    release_devices()
    meter.restart()
    attempt.ended = meter.current_bytes
    del attempt.step
    release_memory()
    meter.restart()
    resting = meter.current_bytes
    points = attempt.points(resting)
    if not points:
        return None
    line = _fit(probe, points, floors, available * MORE_ROOM, cut_short=attempt.cut_short)
    return replace(
        line,
        shape_bytes=float(attempt.shape_bytes if len(points) > 1 else max(resting - before, 0)),
        partial_bytes=probe.partial_bytes,
        heap=probe.heap,
        sizes_bytes=float(max(attempt.rested[-1] - attempt.rested[0], 0)),
    )


def _fit(probe: Probe, points: list[ProbePoint], floors: Floors, room: float, *, cut_short: bool) -> ProbeLine:
    """Fit the line; if only small batches could run, it must not be below the largest one's tensors.

    Larger batches may be used than could be measured: they took too long (``cut_short``), or did not fit beside what
    measuring leaves, but may fit into ``room`` bytes in training. The peak at the largest of them is then that of the
    last one measured plus the tensors that come on top, or what the line adds, if that is more.

    A single point says nothing about smaller batches, which are then not offered. A single sample is not measured in
    addition to two, because kernels for one sample may take more memory and keep it.
    """
    smallest_batch = floors.smallest()[0]
    smallest_batch = max(smallest_batch, points[0].batch) if len(points) == 1 else smallest_batch
    line, most, last = fit_line(probe.name, points, smallest_batch), probe.batch_limit, points[-1]
    if most <= last.batch:
        return line
    used = most if cut_short else line.largest_batch(room, most)
    bounded = cut_short or used >= FAR_ENOUGH * last.batch
    most = used if bounded else most
    least = floors.at(most)
    if bounded:
        grown = max(least - floors.at(last.batch), line.sample_bytes * (most - last.batch))
        least = max(least, last.peak_bytes + int(grown * (1 + BEYOND_MEASURED)))
    bound = ProbePoint(most, max(line.bytes_at(most), least), line.seconds_at(most), line.mapping_at(most))
    if bound.peak_bytes > line.bytes_at(most):
        line = replace(fit_line(probe.name, [*points, bound], smallest_batch), points=line.points)
    return replace(line, bounds=(bound,)) if bounded else line


class _Attempt:
    """One probe being measured; ``measured`` holds points with absolute peaks above the baseline.

    ``built`` is what building took: more than a step does where weights come larger than they are stored. ``rested`` is
    in memory after the steps at each batch size, with all kernels so far; ``ended`` after all, with ``refused`` sizes.
    ``cut_short``: larger batches were left out because they take long. ``mapped`` is what mapping memory cost in the
    step at each batch size, and ``mapping`` in all steps of the process.
    """

    def __init__(
        self,
        probe: Probe,
        meter: PeakMeter,
        limit: MemoryLimit,
        available: float,
        floors: Floors,
        mapping: MappingCost,
    ) -> None:
        self.probe, self.meter, self.limit, self.available = probe, meter, limit, available
        self.floors, self.smallest_batch = floors, floors.smallest()[0]
        self.measured: list[ProbePoint] = []
        self.step: Step | None = None
        self.built, self.cut_short = 0, False
        self.rested, self.mapped = list[int](), list[PageMapping]()
        self.mapping = mapping
        self.ended = self.refused = 0

    def points(self, resting: int) -> list[ProbePoint]:
        """Bytes and seconds of a step at each batch size, without kernels, which stay in memory and add up over sizes.

        A refused size adds to them too, and may also leave gradients. ``resting`` is left once the step is freed: all
        kernels.
        """
        if not self.rested:
            return []
        held = min(max(self.ended, self.rested[-1]), self.rested[-1] + self.refused * self.shape_bytes) - resting
        return [
            replace(
                point,
                peak_bytes=max(point.peak_bytes - rested + held, self.built, 1),
                mapping_seconds=min(self.mapping.seconds(mapped), MOST_MAPPING * point.seconds),
            )
            for point, rested, mapped in zip(self.measured, self.rested, self.mapped, strict=True)
        ]

    @property
    def shape_bytes(self) -> int:
        """The most that a batch size after the first one has left in memory."""
        return max([0, *(after - before for before, after in pairwise(self.rested))])

    def run(self) -> None:
        """Measure at two small batch sizes, then where the probe would work; only there if it has no choice."""
        before = self.meter.current_bytes
        try:
            with self.limit.allow_kernels():
                self.step = self.probe.build()
            self.built = self.meter.mark() - before
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            return
        limit = self.probe.batch_limit
        sizes = [batch for batch in FIRST_BATCHES if self.smallest_batch <= batch < limit]
        if len(sizes) < len(FIRST_BATCHES):
            sizes.append(limit)  # a single point would say nothing of it
        if len(self.probe.sizes) == 1:
            sizes = [batch for batch in self.probe.sizes if batch >= self.smallest_batch]
        for batch in sizes:
            if self._is_hopeless(batch, before) or not self._measure(batch):
                break
        if not self.measured and len(self.probe.sizes) != 1:
            self._measure(self.smallest_batch)
        elif self.measured and len(self.measured) == len(sizes):
            self._measure_largest(before)
        elif len(self.measured) == 1:
            self._measure_second(before, batch)

    def _is_hopeless(self, batch: int, before: int) -> bool:
        """Whether a batch would be refused: a refused step leaves memory behind, which later ones lack."""
        fewest, least = self.floors.smallest()
        most = self.measured[-1].peak_bytes - before if self.measured else least / fewest * batch / 2
        if batch == self.smallest_batch or 2 * most + self.limit.kernel_bytes < self.available:
            return False
        floor = self.floors.below(batch, self.probe.batch_limit)
        return floor * ABOVE_FLOOR + self.limit.kernel_bytes > self.available

    def _measure_largest(self, before: int) -> None:
        points = [replace(point, peak_bytes=point.peak_bytes - before) for point in self.measured]
        line = fit_line(self.probe.name, points)
        room = self.available - self.limit.kernel_bytes
        if self.probe.headroom is not None:
            room = min(room, self.probe.headroom(self.available, self.shape_bytes))
        largest = line.largest_batch(room, self.probe.batch_limit)
        longest = self.probe.longest_seconds
        if line.seconds_at(largest) > longest:
            self.cut_short = True
            quick = (longest - line.fixed_seconds) / max(line.sample_seconds, 1e-9)
            largest = min(largest, max(int(quick), -(-largest // FARTHEST)))
            if largest < FAR_ENOUGH * self.measured[-1].batch:
                return
        while (allowed := self._allowed(largest)) > self.measured[-1].batch:
            if self._measure(allowed):
                return
            largest = int(largest * 0.8)

    def _measure_second(self, before: int, most: int) -> None:
        """Measure the largest batch below ``most``, which did not fit, whose tensors say that it fits.

        A line through a single point says little about larger batches.
        """
        first, limit = self.measured[0], self.probe.batch_limit
        room, least = self.available - self.limit.kernel_bytes, self.floors.below(first.batch, limit)
        quick = int(first.batch * self.probe.longest_seconds / max(first.seconds, 1e-9))
        for size in range(min(most - 1, quick), first.batch, -1):
            batch = self._allowed(size)
            grown = (self.floors.below(batch, limit) - least) * (1 + BEYOND_MEASURED)
            if batch > first.batch and first.peak_bytes - before + grown <= room:
                self._measure(batch)
                return

    def _allowed(self, batch: int) -> int:
        """The largest allowed batch up to ``batch`` that includes the workspace of all smaller ones."""
        shared = batch - batch % torch.get_num_threads() if self.probe.partial_bytes else batch
        batch = shared if shared > self.measured[-1].batch else batch
        return max((size for size in self.probe.sizes if size <= batch), default=batch)

    def _measure(self, batch: int) -> bool:
        """Run one step and, if it was the first, a short one or made many kernels, another that counts.

        The first of all has no optimizer state yet; the first on a new shape generates kernels, some hundredths of a
        second. A device loads kernels when they are first called, which can take longer than a long step.
        """
        step = self.step
        if step is None:
            return False
        self.meter.restart()
        try:
            with self.limit.allow_kernels():
                seconds, mapped = self._run(step, batch)
            peak, rested = self.meter.mark(), self._rest()
            new = max(rested - self.rested[-1], 0) if self.rested else peak
            again = self.probe.warm_up or has_own_memory(self.limit.device)
            long = max(LONG_STEP_SECONDS, LONG_LAYER_SECONDS * self.probe.layers)
            if again or seconds < long or new > FEW_KERNELS * peak:
                (seconds, mapped), new = self._run(step, batch), 0
                peak, rested = self.meter.mark(), self._rest()
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
        else:
            self.measured.append(ProbePoint(batch, peak + new, seconds))
            self.rested.append(rested)
            self.mapped.append(mapped)
            return True
        self.refused += 1
        release_memory()
        return False

    def _rest(self) -> int:
        """Bytes in memory between two steps; a new interval of the meter begins."""
        trim_heap()
        release_devices()
        self.meter.restart()
        return self.meter.current_bytes

    def _run(self, step: Step, batch: int) -> tuple[float, PageMapping]:
        """Seconds of a step, and what mapping memory cost in it."""
        seconds, own = _timed(step, batch, self.limit.device)
        self.mapping.add(own)
        return seconds, own


def _timed(step: Step, batch: int, device: torch.device) -> tuple[float, PageMapping]:
    before = PageMapping.so_far()
    with on_own_core(), Stopwatch() as stopwatch:
        step(batch)
        synchronize(device)
    seconds = stopwatch.quiet if device.type == "cpu" else stopwatch.passed  # a GPU works while the host waits
    return seconds, PageMapping.so_far().since(before)
