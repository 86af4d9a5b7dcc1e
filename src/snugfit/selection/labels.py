"""Partial selections with their costs and importance, and which of them can be dropped.

A label is one partial selection. It is dominated if another costs no more steps, no more bytes and has no less
importance: whatever completes it completes the other at least as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from snugfit.selection.checks import Floats, Integers, Mask

_BLOCK = 192
"""Number of labels that are compared in pairs at a time."""

_EARLIER = np.triu(np.ones((_BLOCK, _BLOCK), bool), 1)


@dataclass(frozen=True)
class Labels:
    """L partial selections.

    Attributes:
        time: steps, (L,).
        memory: bytes, (L,).
        value: importance, (L,).
        words: the tensors as bits, (L, ceil(N / 64)).
    """

    time: Integers
    memory: Integers
    value: Floats
    words: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.time)

    def at(self, index: Integers | Mask) -> Labels:
        """Some of the labels, by index or mask (L,)."""
        return Labels(self.time[index], self.memory[index], self.value[index], self.words[index])

    def plus(self, tensor: int, steps: int, memory_bytes: int, value: float) -> Labels:
        """Each selection with one more tensor."""
        words = self.words.copy()
        words[:, tensor // 64] |= np.uint64(1 << tensor % 64)
        return Labels(self.time + steps, self.memory + memory_bytes, self.value + value, words)

    def charged(self, memory_bytes: int) -> Labels:
        """Each selection with more bytes."""
        return Labels(self.time, self.memory + memory_bytes, self.value, self.words)

    def joined(self, other: Labels) -> Labels:
        """The labels of both."""
        return Labels(
            np.concatenate([self.time, other.time]),
            np.concatenate([self.memory, other.memory]),
            np.concatenate([self.value, other.value]),
            np.concatenate([self.words, other.words]),
        )


def start(tensor: int, value: float, count: int) -> Labels:
    """One label with only the earliest of ``count`` tensors, whose cost is subtracted from the limits in advance."""
    empty = Labels(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1), np.zeros((1, -(-count // 64)), np.uint64))
    return empty.plus(tensor, 0, 0, value)


def tensors(words: NDArray[np.uint64], count: int) -> Mask:
    """The bits of one label as a selection, (N,)."""
    positions = np.arange(count)
    bits = words[positions // 64] >> (positions % 64).astype(np.uint64)
    chosen: Mask = bits % 2 == 1
    return chosen


def undominated(labels: Labels) -> Integers:
    """Indices of the labels that no other dominates, and of one of several equal ones; at least one label.

    Sorted by time, then bytes, then value downward, a label is dominated only by earlier ones. Those of earlier blocks
    are summarised in a frontier, ascending in bytes with the largest value so far; those of its own block are compared
    in
    """
    order = np.lexsort((-labels.value, labels.memory, labels.time))
    memory, value = labels.memory[order], labels.value[order]
    frontier_memory, frontier_value = np.array([-1]), np.array([-np.inf])
    kept = []
    for begin in range(0, len(order), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        below = np.searchsorted(frontier_memory, memory[block], side="right") - 1
        new = begin + np.flatnonzero(frontier_value[below] < value[block])
        new = new[~_beaten(memory[new], value[new])]
        kept.append(new)
        frontier_memory, frontier_value = _merged(frontier_memory, frontier_value, memory[new], value[new])
    return order[np.concatenate(kept)]


def _beaten(memory: Integers, value: Floats) -> Mask:
    """Mask (B,) of the labels of a block that an earlier one of it dominates."""
    pairs = (memory[:, None] <= memory) & (value[:, None] >= value) & _EARLIER[: len(memory), : len(memory)]
    return np.asarray(pairs.any(0))


def _merged(memory: Integers, value: Floats, new_memory: Integers, new_value: Floats) -> tuple[Integers, Floats]:
    """The frontier, ascending in bytes with strictly growing value, with a block's labels added."""
    both, values = np.concatenate([memory, new_memory]), np.concatenate([value, new_value])
    order = np.lexsort((-values, both))
    both, values = both[order], np.maximum.accumulate(values[order])
    grows = np.append(True, values[1:] > values[:-1])
    return both[grows], values[grows]
