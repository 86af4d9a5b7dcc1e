"""The search for the best selection with a given earliest tensor, by labels."""

from __future__ import annotations

import numpy as np

from snugfit.selection import labels
from snugfit.selection.checks import Floats, Mask
from snugfit.selection.completion import Unit, bounds
from snugfit.selection.labels import Labels
from snugfit.selection.relaxation import Knapsacks, Prices

SAME = 1 - 1e-9
"""Sums of importance that differ by less are equal: rounding in sums and bounds stays below this."""

_SCOUTS = 300
"""Number of labels of a first pass, whose selection lets the second pass drop more."""

_PRICES = np.array([0.0, 0.7, 1.0, 1.4])
"""Multiples of the best price: if a label has more of a budget left than the best selection, more is worth less."""


class Branch:
    """One knapsack of ``Knapsacks`` with its prices.

    ``most`` is the largest number of labels kept at once.
    """

    def __init__(self, problem: Knapsacks, price: Prices) -> None:
        self.count, self.most = len(problem.value), 0
        earliest = int(problem.earliest[0])
        self.root = labels.start(earliest, float(problem.value[earliest]), self.count)
        self.time, self.memory = int(problem.time[0]), int(problem.memory[0])
        self.units = _units(problem, float(price.step[0]), float(price.byte[0]))
        step_prices, byte_prices = np.unique(price.step[0] * _PRICES), np.unique(price.byte[0] * _PRICES)
        self.bounds = bounds(self.units, self.time, self.memory, step_prices, byte_prices)

    def search(self, value: float, label_limit: int | None) -> tuple[Mask | None, float, float]:
        """Search for a selection with more importance than ``value``.

        Args:
            value: importance of the best known selection.
            label_limit: largest number of labels; None for no limit.

        Returns:
            The selection (N,) or None, the best value known now, and the highest bound among labels that the limit
                dropped,
            0 if none.
        """
        found, dropped = None, 0.0
        if self._bound(self.root, 0)[0] * SAME <= value:
            return None, value, 0.0
        for limit in (_SCOUTS if label_limit is None else min(_SCOUTS, label_limit), label_limit):
            best, dropped = self._pass(value, limit)
            if best is not None:
                found, value = labels.tensors(best.words[0], self.count), float(best.value[0])
            if dropped * SAME <= value:
                return found, value, 0.0
        return found, value, dropped

    def _pass(self, value: float, limit: int | None) -> tuple[Labels | None, float]:
        """Decide all units; returns the best label above ``value``, and the highest bound beyond the limit."""
        current, dropped = self.root, 0.0
        for index, unit in enumerate(self.units):
            current = self._decided(current, unit)
            bound = self._bound(current, index + 1)
            kept = np.flatnonzero(bound * SAME > value)
            if not len(kept):
                return None, dropped
            kept = kept[labels.undominated(current.at(kept))]
            if limit is not None and len(kept) > limit:
                kept = kept[np.argsort(-bound[kept], kind="stable")]
                dropped = max(dropped, float(bound[kept[limit]]))
                kept = kept[:limit]
            current = current.at(kept)
            self.most = max(self.most, len(current))
        best = current.at(np.array([np.argmax(current.value)]))
        return (best if best.value[0] > value else None), dropped

    def _decided(self, before: Labels, unit: Unit) -> Labels:
        """Extend every label with none and with each set of the unit's tensors that fits."""
        after = before.charged(unit.joint)
        for tensor, steps, own, value in zip(unit.tensors, unit.update, unit.own, unit.value, strict=True):
            added = after.plus(int(tensor), int(steps), int(own), float(value))
            added = added.at((added.time <= self.time) & (added.memory <= self.memory))
            after = added if len(unit.tensors) == 1 else after.joined(added)
        after = after.at(after.memory <= self.memory)
        return before.joined(after)

    def _bound(self, found: Labels, index: int) -> Floats:
        """Upper bound of each label, (L,), when the units from ``index`` on are decided."""
        rest = self.bounds.rest(index, self.time - found.time, self.memory - found.memory)
        return found.value + rest


def _units(problem: Knapsacks, step: float, byte: float) -> list[Unit]:
    """The groups of tensors that are decided together, ordered by the cost of a wrong decision at the prices."""
    allowed = np.flatnonzero(problem.allowed[0])
    surplus = problem.value - step * problem.update - byte * problem.own
    joint = np.append(problem.joint[0], 0)[problem.group]
    ranked = []
    for first in allowed:
        members = allowed[problem.group[allowed] == problem.group[first]] if joint[first] else np.array([first])
        if members[0] == first:
            charge = int(joint[first])
            unit = Unit(members, charge, problem.update[members], problem.own[members], problem.value[members])
            ranked.append((abs(float(np.maximum(surplus[members], 0).sum()) - byte * charge), unit))
            if len(members) == 1:
                ranked[-1] = (abs(float(surplus[first]) - byte * charge), unit)
    return [unit for _, unit in sorted(ranked, key=lambda pair: -pair[0])]
