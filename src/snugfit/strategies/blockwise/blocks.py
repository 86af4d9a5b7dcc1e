"""The Partitioner of NeuroFlux: blocks from measured lines, and their predicted cost. Pure functions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from snugfit._core.plan import Cost, Phase
from snugfit._core.profile import ProbeLine
from snugfit._core.workload import Workload
from snugfit._storage.activation_cache import LABEL_BYTES
from snugfit.strategies.blockwise.partition import Block, cut, partition, repair, shrunk
from snugfit.strategies.memory_estimates import PASS_SHARE, forward_images, with_safety

EVALUATION_SHARE = 0.35
"""Seconds of a unit's forward pass, including its exit, over seconds of its training step."""
RECOMPUTED_CHUNK = 8
"""Images in one forward pass of the trained units when activations are recomputed."""
IMAGE_VALUE_BYTES = 5
"""Bytes of an image's value as read (uint8) and as the network's input (float32)."""


@dataclass(frozen=True)
class UnitNeeds:
    """Memory needs of one unit with its local loss, from its measured line.

    Attributes:
        kept_bytes: weights, local loss and optimizer state between steps.
        fixed_bytes, sample_bytes: its step's upper bound at a batch: ``fixed + sample * batch`` (kept bytes included).
        input_elements: elements of one input sample.
        input_bytes, output_bytes: bytes of one sample in the cache's type.
        smallest_batch: smallest batch that it can train on.
        weight_bytes: weights and buffers of the unit only.
        saved_bytes: upper bound of the bytes of one sample's forward pass.
        shape_bytes: bytes that stay in memory after its training: kernels of batch sizes that were not measured (also
            part of ``fixed_bytes``).
        measured_batch: largest batch that was measured.
        measured: batch sizes whose kernels are in memory already, because they were measured in this process.
        partial_bytes: additional workspace of larger batches.
        unreserved_bytes: part of the reserve for kernels that its step may use. The first step generates the kernels,
            and begins without optimizer state.
        line: its measured line, whose points bound its step at smaller batches; None if unknown.
    """

    name: str
    kept_bytes: int
    fixed_bytes: float
    sample_bytes: float
    input_elements: int
    input_bytes: int
    output_bytes: int
    smallest_batch: int = 1
    weight_bytes: int = 0
    saved_bytes: int = 0
    shape_bytes: float = 0.0
    measured_batch: int = 0
    partial_bytes: int = 0
    measured: tuple[int, ...] = ()
    unreserved_bytes: float = 0.0
    line: ProbeLine | None = None

    def new_kernel_bytes(self, batch: int | None) -> float:
        """Kernels that training leaves at a batch size; None if that is open."""
        return 0.0 if batch in self.measured else self.shape_bytes

    def step_bytes(self, batch: int) -> float:
        """Upper bound of the unit's step."""
        partial = self.partial_bytes if batch > self.measured_batch else 0
        bound = self.fixed_bytes + self.sample_bytes * batch + partial
        return bound if self.line is None else min(bound, self.line.step_bytes(batch) + self.shape_bytes)

    def largest_batch(self, step_bytes: float, limit: int) -> int:
        """Largest batch up to ``limit`` whose step fits ``step_bytes``; 0 if there is none."""
        if math.isinf(self.fixed_bytes):
            return 0
        batch = bisect_right(range(1, limit + 1), step_bytes, key=self.step_bytes)
        return batch if batch >= self.smallest_batch else 0


@dataclass(frozen=True)
class Residency:
    """What is in memory at the same time, and how much memory it may use.

    Attributes:
        base_bytes: bytes in memory before any unit.
        headroom_bytes: bytes for the base, resident units and a step together.
        all_units: whether units outside the active block stay in memory, as in classic local learning.
        recompute: whether the trained units recompute a block's input, instead of a cache.
    """

    needs: Sequence[UnitNeeds]
    base_bytes: int
    headroom_bytes: float
    all_units: bool
    recompute: bool = False

    def bytes_of(self, block: Block, batches: Sequence[int] = ()) -> float:
        """Bytes of a block at its batch size, above the base: resident units, and the largest step of its units.

        ``batches`` are those of the units up to this block's last, if they are known.

        The block's input stays in memory until its last unit is done, in the cache's type (one batch in use, one being
        read) and in float32. A unit's line was measured with the unit's own input instead.
        """
        resident = self.needs if self.all_units else [self.needs[index] for index in block.units]
        kept = sum(need.kept_bytes for need in resident)
        first = self.needs[block.first]
        steps = []
        for index in block.units:
            need = self.needs[index]
            step = need.step_bytes(block.batch_size) - need.kept_bytes
            if index > block.first:
                held = 2 * (first.input_bytes - need.input_bytes) + first.input_elements * 4
                step += held * block.batch_size
            steps.append(step - need.shape_bytes)
        return kept + max(steps) + self.leftover_bytes(block.first, block.last, batches) + self._trunk_bytes(block)

    def leftover_bytes(self, passed: int, last: int, batches: Sequence[int] = ()) -> float:
        """Bytes of kernels that stay in memory after training the units up to ``last``, including earlier blocks.

        The first ``passed`` units have also run without training, at smaller batches. Measured and predicted: VGG-8 in
        bfloat16 before the sixth block 7.4 MB and 8.7 MB, ResNet-18 before the ninth 3.1 and 2.9, MobileNetV2 before
        the fourth 2.8 and 6.8. Kernels of the ``batches`` at which units train count only if these were not measured.
        """
        trained = sum(need.new_kernel_bytes(batch) for need, batch in zip_longest(self.needs[: last + 1], batches))
        return trained + PASS_SHARE * sum(need.shape_bytes for need in self.needs[:passed])

    def _trunk_bytes(self, block: Block) -> int:
        """Bytes of recomputing a block's input: images, trained units before it, and their forward pass."""
        before = self.needs[: block.first]
        if not self.recompute or not before:
            return 0
        images = block.batch_size * before[0].input_elements * IMAGE_VALUE_BYTES
        chunk = RECOMPUTED_CHUNK * max(need.saved_bytes for need in before)
        return images + chunk + sum(need.weight_bytes for need in before)

    def fits(self, block: Block) -> bool:
        """Whether a block stays within the budget."""
        unreserved = min(self.needs[index].unreserved_bytes for index in block.units)
        return self.bytes_of(block) <= self.headroom_bytes + unreserved

    def largest_batches(self, limit: int) -> list[int]:
        """Largest batch of each unit within the budget, at most ``limit`` (Algorithm 1, lines 2-5)."""
        all_kept = sum(need.kept_bytes for need in self.needs)
        batches = []
        for index, need in enumerate(self.needs):
            left = self.leftover_bytes(index, index) - need.shape_bytes
            others = all_kept - need.kept_bytes if self.all_units else 0
            free = self.headroom_bytes + need.unreserved_bytes - left - others
            batches.append(need.largest_batch(free, limit))
        return batches

    def trains(self, block: Block) -> bool:
        """Whether every unit of a block can train at its batch size."""
        return block.batch_size >= max(self.needs[index].smallest_batch for index in block.units)


def make_blocks(
    residency: Residency, limit: int, rho: float, *, adaptive_batch: bool, most_units: int | None = None
) -> list[Block]:
    """Algorithm 1 and residency repair; empty if a unit fits at no batch size.

    If all units stay in memory, splitting a block frees nothing, so its batch is lowered instead. ``limit`` is B, the
    batch size limit. Without ``adaptive_batch`` the smallest batch serves everywhere (the paper's AAN-only ablation).
    """
    batches = residency.largest_batches(limit)
    if min(batches) < 1:
        return []
    if not adaptive_batch:
        batches = [min(batches)] * len(batches)
    blocks = partition(batches, rho)
    if most_units is not None:
        blocks = cut(blocks, batches, most_units)
    if residency.all_units:
        blocks = [shrunk(block, residency.fits) for block in blocks]
    else:
        blocks = repair(blocks, batches, residency.fits, fixed_batch=not adaptive_batch)
    return blocks if all(residency.trains(block) for block in blocks) else []


def unit_batches(blocks: Sequence[Block]) -> list[int]:
    """Batch size of every unit."""
    return [block.batch_size for block in blocks for _ in block.units]


def block_name(names: Sequence[str], index: int) -> str:
    """Name of a block: position, first and last unit."""
    stretch = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"block {index + 1}: {stretch}"


def estimate_blocks(
    residency: Residency,
    blocks: Sequence[Block],
    seconds_per_sample: Sequence[Sequence[float]],
    workload: Workload,
    views: int,
    final: Phase,
) -> Cost:
    """Predicted cost of training blocks one after another.

    ``seconds_per_sample`` are of a training step, by block and unit, at the block's batch size; ``views`` counts cached
    augmented passes, and ``final`` is the phase that tests and saves the exit model.
    """
    phases, epoch_seconds, previous, storage, trunk = [], 0.0, 0, 0, 0.0
    rows = workload.train_count * views + workload.val_count
    batches = unit_batches(blocks)
    for index, (block, seconds) in enumerate(zip(blocks, seconds_per_sample, strict=True)):
        names = tuple(residency.needs[i].name for i in block.units)
        last = index == len(blocks) - 1
        cache = 0 if last or residency.recompute else rows * (residency.needs[block.last].output_bytes + LABEL_BYTES)
        step = sum(seconds)
        train = (step + (EVALUATION_SHARE * trunk if residency.recompute else 0)) * workload.train_count
        trunk += step
        passed = forward_images(workload, tracks=True) + (0 if last else workload.train_count * views)
        evaluate = EVALUATION_SHARE * step * passed
        peak = with_safety(residency.base_bytes, residency.bytes_of(block, batches[: block.last + 1]))
        phases.append(
            Phase(block_name(names, index), peak, train * workload.epochs + evaluate, block.batch_size, names, cache)
        )
        epoch_seconds += train
        storage, previous = max(storage, previous + cache), cache
    phases.append(final)
    peak = max(phase.peak_bytes for phase in phases)
    return Cost(peak, epoch_seconds, sum(phase.seconds for phase in phases), storage, phases=tuple(phases))
