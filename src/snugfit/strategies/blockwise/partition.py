"""Algorithm 1 of NeuroFlux (section 5.2, Partitioner), residency repair, and the choice of the exit (section 5.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snugfit._core.record import ExitRecord

_ROUNDING = 1e-9
"""What products and differences may round down without excluding a threshold itself: 0.29 * 100 is below 29."""


@dataclass(frozen=True)
class Block:
    """Consecutive units ``first..last`` (inclusive, from 0) that train together on batches of ``batch_size``."""

    first: int
    last: int
    batch_size: int

    @property
    def units(self) -> range:
        """Indices of the units."""
        return range(self.first, self.last + 1)


def partition(batches: Sequence[int], rho: float) -> list[Block]:
    """Algorithm 1: put a unit into the previous unit's block if their largest batches differ by at most rho.

    A unit is compared with the last one added, inclusively, and the block's batch is the smallest of its units.
    ``batches`` are the largest of each unit within the budget, capped at the limit (lines 2-5). The paper's rho is 0.4.

    Raises:
        ValueError: a unit's batch is 0.
    """
    if any(batch < 1 for batch in batches):
        raise ValueError("every unit must fit at least one sample")
    blocks: list[Block] = []
    for index, batch in enumerate(batches):
        previous = batches[index - 1]
        if blocks and abs(batch - previous) <= rho * previous + _ROUNDING:
            block = blocks[-1]
            blocks[-1] = Block(block.first, index, min(block.batch_size, batch))
        else:
            blocks.append(Block(index, index, batch))
    return blocks


def cut(blocks: Sequence[Block], batches: Sequence[int], most: int) -> list[Block]:
    """Cut blocks into pieces of at most ``most`` units, so that training can end earlier after any of them.

    A piece takes the smallest of its own units' ``batches``.
    """
    stretches = [block.units[start : start + most] for block in blocks for start in range(0, len(block.units), most)]
    return [Block(units[0], units[-1], min(batches[unit] for unit in units)) for units in stretches]


def repair(
    blocks: Sequence[Block], batches: Sequence[int], fits: Callable[[Block], bool], *, fixed_batch: bool = False
) -> list[Block]:
    """Split blocks that do not fit the budget as a whole.

    The paper checks the budget per unit although the whole block is resident. Each block is cut greedily into the
    longest pieces that fit; a piece takes the smallest of its own units' ``batches``, unless ``fixed_batch`` keeps the
    block's. Single units that do not fit get a smaller batch, down to 0.
    """
    return [piece for block in blocks for piece in _split(block, batches, fits, fixed_batch=fixed_batch)]


def _split(block: Block, batches: Sequence[int], fits: Callable[[Block], bool], *, fixed_batch: bool) -> list[Block]:
    if fits(block):
        return [block]
    pieces: list[Block] = []
    for index in block.units:
        batch = block.batch_size if fixed_batch else batches[index]
        if pieces:
            longer = Block(pieces[-1].first, index, min(pieces[-1].batch_size, batch))
            if fits(longer):
                pieces[-1] = longer
                continue
        pieces.append(shrunk(Block(index, index, batch), fits))
    return pieces


def shrunk(block: Block, fits: Callable[[Block], bool]) -> Block:
    """The block at its largest batch that fits; batch 0 if none does."""
    low, high = 0, block.batch_size
    while low < high:
        middle = (low + high + 1) // 2
        if fits(Block(block.first, block.last, middle)):
            low = middle
        else:
            high = middle - 1
    return Block(block.first, block.last, low)


def standard_error(accuracy: float, count: int) -> float:
    """Standard error of an accuracy measured on ``count`` samples."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0.0) / max(count, 1))


def choose_exit(exits: Sequence[ExitRecord], val_count: int, tolerance: float | None = None) -> ExitRecord:
    """The exit with the fewest parameters whose validation accuracy lies within ``tolerance`` of the highest.

    By default the tolerance is one standard error of the best; it is 0 in the paper.
    """
    best = max(record.val_accuracy for record in exits)
    if tolerance is None:
        tolerance = standard_error(best, val_count)
    eligible = [record for record in exits if record.val_accuracy >= best - tolerance - _ROUNDING]
    return min(eligible, key=lambda record: (record.parameters, -record.val_accuracy))


def saturated(exits: Sequence[ExitRecord], block_units: Sequence[int], val_count: int) -> bool:
    """Whether the block just finished no longer improves validation accuracy over all exits before it.

    An improvement counts when it exceeds one standard error. The first block is never saturated.
    """
    members = set(block_units)
    before = [record.val_accuracy for record in exits if record.index not in members]
    inside = [record.val_accuracy for record in exits if record.index in members]
    if not before or not inside:
        return False
    best = max(before)
    return max(inside) <= best + standard_error(best, val_count)
