"""Choose the exit of a locally trained network (NeuroFlux section 5.4). Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from snugfit._core.record import ExitRecord


def standard_error(accuracy: float, count: int) -> float:
    """Standard error of an accuracy measured on ``count`` samples."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0.0) / max(count, 1))


def choose_exit(exits: Sequence[ExitRecord], val_count: int, tolerance: float | None = None) -> ExitRecord:
    """The exit with the fewest parameters whose validation accuracy lies within ``tolerance`` of the highest.

    Args:
        exits: all exits measured, at least one.
        val_count: size of the validation split.
        tolerance: acceptable loss of accuracy; one standard error of the best by default, 0 in the paper.
    """
    best = max(record.val_accuracy for record in exits)
    if tolerance is None:
        tolerance = standard_error(best, val_count)
    eligible = [record for record in exits if record.val_accuracy >= best - tolerance]
    return min(eligible, key=lambda record: (record.parameters, -record.val_accuracy))


def frontier(exits: Sequence[ExitRecord]) -> list[ExitRecord]:
    """Exits that no other beats in both accuracy and parameters, by increasing parameters."""
    kept: list[ExitRecord] = []
    for record in sorted(exits, key=lambda record: (record.parameters, -record.val_accuracy)):
        if not kept or record.val_accuracy > kept[-1].val_accuracy:
            kept.append(record)
    return kept


def saturated(exits: Sequence[ExitRecord], block_units: Sequence[int], val_count: int) -> bool:
    """Whether the block just finished no longer improves validation accuracy over all exits before it.

    An improvement counts when it exceeds one standard error. The first block is never saturated.

    Args:
        exits: all exits measured so far.
        block_units: indices of the units of the block just finished.
        val_count: size of the validation split.
    """
    members = set(block_units)
    before = [record.val_accuracy for record in exits if record.index not in members]
    inside = [record.val_accuracy for record in exits if record.index in members]
    if not before or not inside:
        return False
    best = max(before)
    return max(inside) <= best + standard_error(best, val_count)
