"""Upper bounds on what the undecided tensors can add to a partial selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from snugfit.selection.checks import Floats, Integers

_GRAINS = 1500
"""Number of grains of bytes, for bounds alone."""


@dataclass(frozen=True)
class Unit:
    """A single tensor, or several that are decided together because they share a saved input.

    Attributes:
        tensors: their indices.
        joint: bytes of the input that they share.
        update, own, value: steps, bytes and importance of each.
    """

    tensors: Integers
    joint: int
    update: Integers
    own: Integers
    value: Floats


@dataclass(frozen=True)
class Bounds:
    """Upper bounds on what the undecided units can add to a label, from two sides: one budget exact, the other priced.

    Attributes:
        time_tables: by steps left, bytes priced, (S + 1, P, capacity + 1).
        byte_prices: importance per byte, (P,).
        memory_tables: by grains of bytes left, steps priced, (S + 1, P', grains + 1).
        step_prices: importance per step, (P',).
        grain: bytes of a grain.
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


def bounds(units: Sequence[Unit], time: int, memory: int, step_prices: Floats, byte_prices: Floats) -> Bounds:
    """Tables for S units in the order of decision, with at most ``time`` steps and ``memory`` bytes left.

    Bytes are counted in grains, rounded down, so that the tables never underestimate.
    """
    grain = max(1, -(-memory // _GRAINS))
    by_time, by_memory = [], []
    for unit in units:
        by_time.append(_Side(unit.value, unit.update, 0, unit.own, unit.joint))
        by_memory.append(_Side(unit.value, unit.own // grain, unit.joint // grain, unit.update, 0))
    return Bounds(
        _tables(by_time, time, byte_prices),
        byte_prices,
        _tables(by_memory, memory // grain, step_prices),
        step_prices,
        grain,
    )


@dataclass(frozen=True)
class _Side:
    """A unit in a table: values, exact and priced costs of its tensors and of what they share."""

    value: Floats
    exact: Integers
    joint_exact: int
    priced: Integers
    joint_priced: int


def _tables(sides: Sequence[_Side], capacity: int, prices: Floats) -> Floats:
    """Most that the units from each one on add, minus the price of one cost, for each amount of the other.

    Returns:
        (S + 1, P, capacity + 1); the last is 0 because nothing is left to decide.
    """
    tables = np.zeros((len(sides) + 1, len(prices), capacity + 1))
    for index in range(len(sides) - 1, -1, -1):
        side, table = sides[index], tables[index]
        opened = tables[index + 1, :, : capacity + 1 - side.joint_exact] - (prices * side.joint_priced)[:, None]
        for exact, priced, value in zip(side.exact, side.priced, side.value, strict=True):
            added = opened[:, : max(0, opened.shape[1] - exact)] + (value - prices * priced)[:, None]
            opened = opened.copy()
            np.maximum(opened[:, exact:], added, out=opened[:, exact:])
        table[:] = tables[index + 1]
        np.maximum(table[:, side.joint_exact :], opened, out=table[:, side.joint_exact :])
    return tables
