"""The widths with the least loss of accuracy within a memory bound: exact search over a chain of blocks; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from snugfit.errors import ModelError


@dataclass(frozen=True)
class Choices:
    """The possible widths of a block, and what each costs.

    Attributes:
        loss: what each of its J choices costs in accuracy, (J,).
        peak: bytes that the block needs at its worst layer, above what blocks before it have saved, (I, J): by the
            choice of the block before, which decides how wide its input is, and by its own. I is 1 where the former
            makes no difference.
        saved: bytes that the block adds to the cumulative memory, (I, J).
    """

    loss: NDArray[np.float64]
    peak: NDArray[np.int64]
    saved: NDArray[np.int64]

    def costs(self, before: int, own: int) -> tuple[int, int]:
        """Peak and saved bytes for a choice of the block before and one of its own."""
        row = before if len(self.peak) > 1 else 0
        return int(self.peak[row, own]), int(self.saved[row, own])


@dataclass(frozen=True)
class Chosen:
    """Choices for some blocks from the first.

    Attributes:
        choices: index of each block's choice.
        loss: the sum of theirs.
        peak: peak activation memory so far, equation (1), in bytes.
        saved: cumulative memory so far, equation (3), in bytes.
    """

    choices: tuple[int, ...]
    loss: float
    peak: int
    saved: int


def choose_widths(blocks: Sequence[Choices], bound: int) -> Chosen:
    """The choices of least loss whose peak activation memory, equations (1) to (3), is within a bound: exact.

    A block's peak adds to the memory saved by all blocks before it, so pruning one also lowers the peaks of later ones.
    Partial choices are kept as labels, separately for each choice of the last block; a label that
    saves no less and loses no less than another is dropped, because whatever completes it completes the other at least
    as well. Among equal losses the peak is not minimised.

    Raises:
        ModelError: nothing fits; the message contains the smallest possible peak.
    """
    ends = _search(blocks, lambda label: label.loss, bound)
    if not ends:
        raise ModelError(f"no choice of widths fits {bound} bytes; the smallest peak is {smallest_peak(blocks)} bytes.")
    return min(ends, key=lambda label: (label.loss, label.peak))


def smallest_peak(blocks: Sequence[Choices]) -> int:
    """The smallest peak activation memory of all choices, in bytes."""
    return min(label.peak for label in _search(blocks, lambda label: label.peak, None))


def _search(blocks: Sequence[Choices], cost: Callable[[Chosen], float], bound: int | None) -> list[Chosen]:
    """Choices for all blocks that no other beats in both saved bytes and cost."""
    labels = [[Chosen((), 0.0, 0, 0)]]
    for at, block in enumerate(blocks):
        ways = [_extended(labels, block, own) for own in range(len(block.loss))]
        if at + 1 == len(blocks) or len(blocks[at + 1].peak) == 1:
            ways = [list(chain.from_iterable(ways))]  # the last choice makes no difference to the next block
        labels = [_undominated(found, cost, bound) for found in ways]
    return list(chain.from_iterable(labels))


def _extended(labels: list[list[Chosen]], block: Choices, own: int) -> list[Chosen]:
    """Extend every label by one block's choice; labels are separated by the choice of the block before."""
    found = []
    for before, ending in enumerate(labels):
        peak, saved = block.costs(before, own)
        for label in ending:
            highest, loss = max(label.peak, label.saved + peak), label.loss + float(block.loss[own])
            found.append(Chosen((*label.choices, own), loss, highest, label.saved + saved))
    return found


def _undominated(labels: list[Chosen], cost: Callable[[Chosen], float], bound: int | None) -> list[Chosen]:
    """The labels within the bound that no other equals or beats in both saved bytes and cost."""
    kept: list[Chosen] = []
    fitting = (label for label in labels if bound is None or label.peak <= bound)
    for label in sorted(fitting, key=lambda label: (label.saved, cost(label))):
        if not kept or cost(label) < cost(kept[-1]):
            kept.append(label)
    return kept
