"""The search for the best selection with a given earliest tensor, by labels.

A label is one partial selection. It is dominated if another costs no more steps, no more bytes and has no less
importance: whatever completes it completes the other at least as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from snugfit.selection.checks import Floats, Integers, Mask
from snugfit.selection.relaxation import Knapsacks, Prices

SAME = 1 - 1e-9
"""Sums of importance that differ by less are equal: rounding in sums and bounds stays below this."""

_SCOUTS = 300
"""Number of labels of a first pass, whose selection lets the second pass drop more."""

_PRICES = np.array([0.0, 0.7, 1.0, 1.4])
"""Multiples of the best price: if a label has more of a budget left than the best selection, more is worth less."""
_GRAINS = 1500
"""Number of grains of bytes, for bounds alone."""
_BLOCK = 192
"""Number of labels that are compared in pairs at a time."""

_EARLIER = np.triu(np.ones((_BLOCK, _BLOCK), bool), 1)


class Branch:
    """One knapsack of ``Knapsacks`` with its prices; ``most`` is the largest number of labels kept at once."""

    def __init__(self, problem: Knapsacks, price: Prices) -> None:
        self.count, self.most = len(problem.value), 0
        earliest = int(problem.earliest[0])
        self.root = _start(earliest, float(problem.value[earliest]), self.count)
        self.time, self.memory = int(problem.time[0]), int(problem.memory[0])
        self.units = _units(problem, float(price.step[0]), float(price.byte[0]))
        step_prices, byte_prices = np.unique(price.step[0] * _PRICES), np.unique(price.byte[0] * _PRICES)
        self.bounds = _bounds(self.units, self.time, self.memory, step_prices, byte_prices)

    def search(self, value: float, label_limit: int | None) -> tuple[Mask | None, float, float]:
        """Search for a selection with more importance than ``value``, that of the best known selection.

        Returns:
            The selection (N,) or None, the best value known now, and the highest bound among labels that the limit
                dropped, 0 if none.
        """
        found, dropped = None, 0.0
        if self._bound(self.root, 0)[0] * SAME <= value:
            return None, value, 0.0
        for limit in (_SCOUTS if label_limit is None else min(_SCOUTS, label_limit), label_limit):
            best, dropped = self._pass(value, limit)
            if best is not None:
                found, value = _tensors(best.words[0], self.count), float(best.value[0])
            if dropped * SAME <= value:
                return found, value, 0.0
        return found, value, dropped

    def _pass(self, value: float, limit: int | None) -> tuple[_Labels | None, float]:
        """Decide all units; returns the best label above ``value``, and the highest bound beyond the limit."""
        current, dropped = self.root, 0.0
        for index, unit in enumerate(self.units):
            current = self._decided(current, unit)
            bound = self._bound(current, index + 1)
            kept = np.flatnonzero(bound * SAME > value)
            if not len(kept):
                return None, dropped
            kept = kept[_undominated(current.at(kept))]
            if limit is not None and len(kept) > limit:
                kept = kept[np.argsort(-bound[kept], kind="stable")]
                dropped = max(dropped, float(bound[kept[limit]]))
                kept = kept[:limit]
            current = current.at(kept)
            self.most = max(self.most, len(current))
        best = current.at(np.array([np.argmax(current.value)]))
        return (best if best.value[0] > value else None), dropped

    def _decided(self, before: _Labels, unit: _Unit) -> _Labels:
        """Extend every label with none and with each set of the unit's tensors that fits."""
        after = before.charged(unit.joint)
        for tensor, steps, own, value in zip(unit.tensors, unit.update, unit.own, unit.value, strict=True):
            added = after.plus(int(tensor), int(steps), int(own), float(value))
            added = added.at((added.time <= self.time) & (added.memory <= self.memory))
            after = added if len(unit.tensors) == 1 else after.joined(added)
        after = after.at(after.memory <= self.memory)
        return before.joined(after)

    def _bound(self, found: _Labels, index: int) -> Floats:
        """Upper bound of each label, (L,), when the units from ``index`` on are decided."""
        rest = self.bounds.rest(index, self.time - found.time, self.memory - found.memory)
        return found.value + rest


def _units(problem: Knapsacks, step: float, byte: float) -> list[_Unit]:
    """The groups of tensors that are decided together, ordered by the cost of a wrong decision at the prices."""
    allowed = np.flatnonzero(problem.allowed[0])
    surplus = problem.value - step * problem.update - byte * problem.own
    joint = np.append(problem.joint[0], 0)[problem.group]
    ranked = []
    for first in allowed:
        members = allowed[problem.group[allowed] == problem.group[first]] if joint[first] else np.array([first])
        if members[0] == first:
            charge = int(joint[first])
            unit = _Unit(members, charge, problem.update[members], problem.own[members], problem.value[members])
            gain = float(surplus[first] if len(members) == 1 else np.maximum(surplus[members], 0).sum())
            ranked.append((abs(gain - byte * charge), unit))
    return [unit for _, unit in sorted(ranked, key=lambda pair: -pair[0])]


@dataclass(frozen=True)
class _Unit:
    """A single tensor, or several that share a saved input of ``joint`` bytes and are decided together.

    ``update``, ``own`` and ``value`` are steps, bytes and importance of each.
    """

    tensors: Integers
    joint: int
    update: Integers
    own: Integers
    value: Floats


@dataclass(frozen=True)
class _Bounds:
    """Upper bounds on what the undecided units can add to a label, from two sides: one budget exact, the other priced.

    ``time_tables`` (S + 1, P, capacity + 1) are by steps left, with bytes priced at ``byte_prices`` (P,);
    ``memory_tables`` (S + 1, P', grains + 1) by grains of bytes left, with steps priced at ``step_prices`` (P',).
    """

    time_tables: Floats
    byte_prices: Floats
    memory_tables: Floats
    step_prices: Floats
    grain: int

    def rest(self, index: int, time: Integers, memory: Integers) -> Floats:
        """Bound (L,) on what the units from ``index`` on add when these steps and bytes (L,) are left."""
        by_time = self.time_tables[index][:, time] + self.byte_prices[:, None] * memory
        by_memory = self.memory_tables[index][:, memory // self.grain] + self.step_prices[:, None] * time
        least: Floats = np.minimum(by_time.min(0), by_memory.min(0))
        return least


def _bounds(units: Sequence[_Unit], time: int, memory: int, step_prices: Floats, byte_prices: Floats) -> _Bounds:
    """Tables for S units in the order of decision, with at most ``time`` steps and ``memory`` bytes left.

    Bytes are counted in grains, rounded down, so that the tables never underestimate.
    """
    grain = max(1, -(-memory // _GRAINS))
    by_time = [(unit.value, unit.update, 0, unit.own, unit.joint) for unit in units]
    by_memory = [(unit.value, unit.own // grain, unit.joint // grain, unit.update, 0) for unit in units]
    memory_tables = _tables(by_memory, memory // grain, step_prices)
    return _Bounds(_tables(by_time, time, byte_prices), byte_prices, memory_tables, step_prices, grain)


def _tables(units: Sequence[tuple[Floats, Integers, int, Integers, int]], capacity: int, prices: Floats) -> Floats:
    """Most that the units from each one on add, minus the price of one cost, for each amount of the other.

    A unit is the values of its tensors, their exact costs and the shared one, their priced costs and the shared one.

    Returns:
        (S + 1, P, capacity + 1); the last is 0 because nothing is left to decide.
    """
    tables = np.zeros((len(units) + 1, len(prices), capacity + 1))
    for index in range(len(units) - 1, -1, -1):
        values, costs, joint, priced_costs, priced_joint = units[index]
        opened = tables[index + 1, :, : capacity + 1 - joint] - (prices * priced_joint)[:, None]
        for exact, priced, value in zip(costs, priced_costs, values, strict=True):
            added = opened[:, : max(0, opened.shape[1] - exact)] + (value - prices * priced)[:, None]
            opened = opened.copy()
            np.maximum(opened[:, exact:], added, out=opened[:, exact:])
        tables[index] = tables[index + 1]
        np.maximum(tables[index, :, joint:], opened, out=tables[index, :, joint:])
    return tables


@dataclass(frozen=True)
class _Labels:
    """L partial selections: steps, bytes and importance, (L,) each, and the tensors as bits, (L, ceil(N / 64))."""

    time: Integers
    memory: Integers
    value: Floats
    words: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.time)

    def at(self, index: Integers | Mask) -> _Labels:
        """Some of the labels, by index or mask (L,)."""
        return _Labels(self.time[index], self.memory[index], self.value[index], self.words[index])

    def plus(self, tensor: int, steps: int, memory_bytes: int, value: float) -> _Labels:
        """Each selection with one more tensor."""
        words = self.words.copy()
        words[:, tensor // 64] |= np.uint64(1 << tensor % 64)
        return _Labels(self.time + steps, self.memory + memory_bytes, self.value + value, words)

    def charged(self, memory_bytes: int) -> _Labels:
        """Each selection with more bytes."""
        return _Labels(self.time, self.memory + memory_bytes, self.value, self.words)

    def joined(self, other: _Labels) -> _Labels:
        """The labels of both."""
        return _Labels(
            np.concatenate([self.time, other.time]),
            np.concatenate([self.memory, other.memory]),
            np.concatenate([self.value, other.value]),
            np.concatenate([self.words, other.words]),
        )


def _start(tensor: int, value: float, count: int) -> _Labels:
    """One label with only the earliest of ``count`` tensors, whose cost is subtracted from the limits in advance."""
    zero = np.zeros(1, np.int64)
    return _Labels(zero, zero, np.zeros(1), np.zeros((1, -(-count // 64)), np.uint64)).plus(tensor, 0, 0, value)


def _tensors(words: NDArray[np.uint64], count: int) -> Mask:
    """The bits of one label as a selection, (N,)."""
    positions = np.arange(count)
    bits = words[positions // 64] >> (positions % 64).astype(np.uint64)
    chosen: Mask = bits % 2 == 1
    return chosen


def _undominated(labels: _Labels) -> Integers:
    """Indices of the labels that no other dominates, and of one of several equal ones; at least one label.

    Sorted by time, then bytes, then value downward, a label is dominated only by earlier ones. Those of earlier blocks
    are summarised in a frontier, ascending in bytes with the largest value so far; those of its own block are compared
    in pairs.
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
