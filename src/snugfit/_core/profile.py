"""Memory and time of each part of a model: lines fitted to measured probes, unit statistics, operators and tensors."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

WHOLE_GROWTH = 0.7
"""Growth of a peak that is room for all freed memory; see ``snugfit.memory.freed_memory``."""
HeapUse = Literal["layers", "recomputed", "steps", "nothing"]
"""How much freed memory the heap keeps in training. ``layers``: as much as leaves room for the next layer.
``recomputed``: as much, where layers run again and units have graphs of their own. ``steps``: all of it if there is
room, else none, because a step calls no layers or one layer takes most of it. ``nothing``: none, or the step maps
files."""
_FIRST_SHARES = {"layers": 0.4, "recomputed": 0.6}
"""Share of a step's time for mapping memory that is saved without growth of a peak: a layer takes what others freed."""
_FULL_GROWTH = 0.2
"""Growth of a peak with which a step's layers map next to no memory."""


def saved_share(heap: HeapUse, room_bytes: int, peak_bytes: int) -> float:
    """Share of a step's time for mapping memory that training saves, if the peak may grow to ``room_bytes``.

    Without room nothing is saved, since none is kept.
    """
    if heap == "nothing" or not room_bytes:
        return 0.0
    growth = max(room_bytes / max(peak_bytes, 1) - 1, 0.0)
    if heap == "steps":
        return float(growth >= WHOLE_GROWTH)
    first = _FIRST_SHARES[heap]
    return min(first + (1 - first) * growth / _FULL_GROWTH, 1.0)


@dataclass(frozen=True)
class Saved:
    """A feature map that is kept for the backward pass, once for all that need it: its number, and bytes per sample."""

    map: int
    bytes: int


@dataclass(frozen=True)
class TensorStats:
    """One trainable tensor.

    Attributes:
        seconds: additional time of its gradient, for the profile's batch.
        update_seconds: time of its optimizer step, independent of the batch.
        macs: multiply-accumulates of its gradient, per sample.
        saved: feature maps that are kept only because it trains.
        scratch_bytes: peak of temporary memory during its gradient, per sample.
    """

    name: str
    parameters: int
    bytes: int
    seconds: float
    update_seconds: float
    macs: int = 0
    saved: tuple[Saved, ...] = ()
    scratch_bytes: int = 0


@dataclass(frozen=True)
class Scratch:
    """Peak bytes of an operator's temporary memory per sample, without its inputs, outputs and kept tensors.

    ``alone`` is that of a forward pass without gradients, the others are those of the two passes with a gradient.
    """

    alone: int = 0
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class OperatorStats:
    """One operator: a layer, or a function between layers. Bytes and multiply-accumulates are per sample.

    Attributes:
        kind: class of the layer, or the function's name.
        inputs: numbers of the operators whose outputs it reads; -1 for the network's input.
        map: number of its output feature map; in-place operators and views return that of their input.
        forward_seconds: time of its forward pass without gradients, for the profile's batch.
        pass_seconds: extra time in both passes when a gradient passes through it down to its inputs.
        macs: those of its forward pass; passing a gradient takes as many.
        saved: feature maps that are kept because a gradient passes through it.
        tensors: the trainable tensors that it reads, in the layer's order.
        entry: number of the operator whose output is the input of its unit, -1 for the network's input; that output
            stays in memory while the unit runs.
        handed: those of ``inputs`` whose gradients share memory with that of the output, as for views and sums.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    map: int
    output_bytes: int
    forward_seconds: float
    pass_seconds: float
    macs: int = 0
    saved: tuple[Saved, ...] = ()
    tensors: tuple[TensorStats, ...] = ()
    entry: int = -1
    handed: tuple[int, ...] = ()
    scratch: Scratch = Scratch()


@dataclass(frozen=True)
class StepSeconds:
    """Median times of whole training steps of ``batch`` samples, measured alternately.

    ``stock`` is full training with torch's own operators (T_full of ElasticTrainer). The others have the strategy's
    operators: ``full`` trains everything, ``head`` only the classifier. ``mapping_share`` of these times is for mapping
    memory; see :class:`ProbePoint`.
    """

    batch: int
    stock: float
    full: float
    head: float
    mapping_share: float = 0.0

    def times(self, factor: float) -> StepSeconds:
        """All of them multiplied."""
        return replace(self, stock=factor * self.stock, full=factor * self.full, head=factor * self.head)


@dataclass(frozen=True)
class TensorProfile:
    """Every operator of a network in order of execution, measured at one batch.

    Attributes:
        steps: whole steps, to calibrate the sum over operators; None if they do not fit the budget.
        seconds: duration of profiling.
        input_bytes: bytes of the network's input per sample.
    """

    batch: int
    operators: tuple[OperatorStats, ...]
    steps: StepSeconds | None = None
    seconds: float = 0.0
    input_bytes: int = 0

    @property
    def tensors(self) -> tuple[TensorStats, ...]:
        """All trainable tensors in order of execution, the input's first."""
        return tuple(tensor for operator in self.operators for tensor in operator.tensors)


@dataclass(frozen=True)
class ProbePoint:
    """One measured step of a probe: batch size, peak bytes above the probe's start, seconds of a warm step.

    ``mapping_seconds`` of these are for mapping memory, because the step before gave all back: freed memory that the
    heap keeps saves them.
    """

    batch: int
    peak_bytes: int
    seconds: float
    mapping_seconds: float = 0.0


@dataclass(frozen=True)
class ProbeLine:
    """Linear model of a probe over batch size (NeuroFlux section 5.2, Profiler; Figure 8).

    Predicted bytes are at most ``fixed_bytes + sample_bytes * batch + residual_bytes``: the least-squares line lifted
    by its largest residual, so that no measured point lies above it. Between two points, measured or computed, they are
    at most those of the straight line through both: a step's peak is the largest of many amounts that grow linearly
    with the batch, so it is convex. Seconds are those of a step.

    Attributes:
        residual_bytes: largest amount by which a measured point lies above the line (>= 0).
        smallest_batch: smallest batch that it can train on; 2 if BatchNorm has 1x1 feature maps.
        shape_bytes: bytes that an unmeasured batch size leaves in memory: kernels generated for its shapes.
        partial_bytes: additional workspace of batches above the largest measured one.
        sizes_bytes: bytes that measuring batch sizes after the first one left in memory.
        elsewhere: whether another process measured it, so that this one has no kernels of its batch sizes yet.
        bounds: upper bounds at batches above the largest measured one, computed from tensors; in order.
        fixed_mapping, sample_mapping: the line of the seconds for mapping memory.
        heap: how much freed memory the heap keeps in training.
        room_bytes: to which a peak may grow for that; 0 if none is kept.
        beside_bytes: memory beside the step.
    """

    name: str
    fixed_bytes: float
    sample_bytes: float
    residual_bytes: float
    fixed_seconds: float
    sample_seconds: float
    points: tuple[ProbePoint, ...] = ()
    smallest_batch: int = 1
    shape_bytes: float = 0.0
    partial_bytes: int = 0
    sizes_bytes: float = 0.0
    elsewhere: bool = False
    bounds: tuple[ProbePoint, ...] = ()
    fixed_mapping: float = 0.0
    sample_mapping: float = 0.0
    heap: HeapUse = "layers"
    room_bytes: int = 0
    beside_bytes: int = 0

    @property
    def measured_batch(self) -> int:
        """The largest measured batch; 0 if there is none."""
        return self.points[-1].batch if self.points else 0

    def bytes_at(self, batch: int) -> int:
        """Upper bound of the peak at ``batch`` samples, in bytes, including kernels of a new batch size."""
        return self._bound(batch, self.new_kernel_bytes(batch))

    def step_bytes(self, batch: int) -> int:
        """Upper bound of the peak at ``batch`` samples, in bytes, without kernels of a new batch size."""
        return self._bound(batch, 0.0)

    def new_kernel_bytes(self, batch: int) -> float:
        """Bytes of kernels that a step of ``batch`` samples leaves in a process that has none of this size yet."""
        measured = any(point.batch == batch for point in self.points)
        return 0.0 if measured and not self.elsewhere else self.shape_bytes

    def _bound(self, batch: int, new_bytes: float) -> int:
        partial = self.partial_bytes if batch > self.measured_batch else 0
        bound = self.fixed_bytes + self.sample_bytes * batch + self.residual_bytes
        return int(min(bound, self._measured_bound(batch)) + new_bytes) + partial + 1

    def _measured_bound(self, batch: int) -> float:
        """Bytes at ``batch`` by the points beside it; infinite above them, or if some batches need more workspace."""
        if self.partial_bytes:
            return math.inf
        low, least = 0, 0.0
        for size, peaks in groupby((*self.points, *self.bounds), key=lambda point: point.batch):
            peak = max(least, *(float(point.peak_bytes) for point in peaks))
            if batch <= size:
                share = (batch - low) / (size - low) if low else 1.0
                return least + share * (peak - least)
            low, least = size, peak
        return math.inf

    def seconds_at(self, batch: int) -> float:
        """Expected seconds of a step at ``batch`` samples, interpolated between measured points.

        They are those of training, which saves time for mapping memory where the peak has room to grow.
        """
        point = self._point(batch)
        seconds = self.fixed_seconds + self.sample_seconds * batch if point is None else point.seconds
        saved = saved_share(self.heap, self.room_bytes, self.beside_bytes + self.bytes_at(batch))
        return max(seconds - saved * self.mapping_at(batch), 0.0)

    def mapping_at(self, batch: int) -> float:
        """Expected seconds for mapping memory in a step at ``batch`` samples that finds none."""
        point = self._point(batch)
        return max(self.fixed_mapping + self.sample_mapping * batch, 0.0) if point is None else point.mapping_seconds

    def _point(self, batch: int) -> ProbePoint | None:
        return next((point for point in self.points if point.batch == batch), None)

    def largest_batch(self, available_bytes: float, limit: int) -> int:
        """Largest batch up to ``limit`` whose predicted peak is at most ``available_bytes``; 0 if there is none."""
        bounds = range(limit + 1)
        batch = bisect_right(bounds, available_bytes, key=lambda each: self._bound(each, self.shape_bytes)) - 1
        measured = [each.batch for each in self.points if each.batch <= limit]
        batch = max([batch, *(each for each in measured if self.bytes_at(each) <= available_bytes)])
        return batch if batch >= self.smallest_batch else 0


@dataclass(frozen=True)
class UnitStats:
    """Statistics of a unit, known without running it on data. Bytes but those of weights are per sample.

    Attributes:
        weight_bytes: bytes of parameters and buffers.
        macs: multiply-accumulates of one sample's forward pass.
        output_shape: shape of one sample's output, without the batch axis.
        output_bytes: bytes of the output in float32.
        saved_bytes: bytes that autograd keeps for the backward pass.
        seconds: seconds of one sample's forward pass, if measured.
        tracks: whether training updates running statistics of norms.
        trained: number of parameters that are not frozen.
        tensors: number of tensors that ``parameters`` are in.
    """

    name: str
    parameters: int
    weight_bytes: int
    macs: int
    output_shape: tuple[int, ...]
    output_bytes: int
    saved_bytes: int
    seconds: float = 0.0
    tracks: bool = False
    trained: int = 0
    tensors: int = 0


@dataclass(frozen=True)
class Profile:
    """All measurements of one workload on one machine.

    Attributes:
        units: statistics of each unit, in chain order, the head last.
        lines: fitted lines by probe name; a probe that does not fit the budget at one sample has none.
        floors: by probe name, tensor bytes of one step at the smallest batch, known without running it.
        kept: by probe name, bytes held between two steps: weights, buffers and optimizer state.
        base_bytes: memory already in use, above the baseline, before any strategy runs (data set, chain, caches).
        start_bytes: that part of it which was in use before the first probe was measured.
        left: by probe name, the part of it that measuring the probe left.
        expected: by probe name, the part of it that is not in memory yet: another process measured the probe, and what
            that left is expected to be left again where the probe's strategy trains.
        seconds: duration of profiling.
        delay_seconds: those of them that other processes added, because they had the cores.
        tensors: all operators and tensors, if a strategy requires them.
    """

    units: tuple[UnitStats, ...]
    lines: dict[str, ProbeLine] = field(default_factory=dict)
    floors: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    base_bytes: int = 0
    start_bytes: int = 0
    left: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    tensors: TensorProfile | None = None
    expected: dict[str, int] = field(default_factory=dict)
    delay_seconds: float = 0.0

    @property
    def delay_share(self) -> float:
        """Share of the duration that other processes added."""
        return self.delay_seconds / self.seconds if self.seconds else 0.0
