"""The selection within a time budget and a memory budget: section 6's problem with a second limit.

A table over time and exact bytes would be too large, so partial selections are kept as labels, and three measures keep
their number small:

1. The earliest tensor is fixed in turn, those with the highest bound first (``relaxation``). Then the cost of passing
the gradient is fixed, tensors may be decided in any order, and those that share a saved input are decided together, so
a label need not record which inputs are live. The search ends once no bound exceeds the best known selection. 2.
Tensors are decided in order of the cost of a wrong decision at the prices of the bound. A label whose value plus the
bound of the rest (``branch``) cannot exceed the best known selection is dropped. Most tensors then have only one
decision, and labels multiply only among those whose importance is near their price. 3. Dominated labels are dropped
(``branch``). For each number of bytes that leaves at most one label per step of time.

The number of different sums of bytes can grow exponentially: if importance follows cost closely and no two sums are
equal, every label is near the bound and none is dominated. ``label_limit`` bounds memory and time then: the labels with
the highest bound are kept, and the answer contains an upper bound on the importance of any selection. Tests check that
synthetic ResNet-50 profiles, where importance follows cost too, stay far below the limit.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from snugfit.errors import UsageError
from snugfit.selection import checks
from snugfit.selection.branch import SAME, Branch
from snugfit.selection.checks import Mask
from snugfit.selection.cost_model import ByteModel
from snugfit.selection.quantise import quantise
from snugfit.selection.relaxation import COARSE, FINE, Knapsacks, Prices, greedy, knapsacks, prices
from snugfit.selection.solver import select


@dataclass(frozen=True)
class BoundedSelection:
    """A selection within two budgets.

    Attributes:
        mask: which tensors to train, (N,).
        value: the sum of their importance.
        bound: no selection exceeds it. Equal to ``value``, and so exact, unless the label limit was reached.
        most_labels: the largest number of labels kept at once.
    """

    mask: Mask
    value: float
    bound: float
    most_labels: int


@dataclass(frozen=True)
class Limits:
    """The budgets of a selection, and how exactly it is searched for.

    Attributes:
        seconds: limit for the backward pass.
        memory_bytes: limit for the sum of a selection's bytes.
        resolution: steps of the time budget to which times are rounded upward; bytes are exact.
        label_limit: most labels that are kept at once; None for no limit.
    """

    seconds: float
    memory_bytes: float
    resolution: int = 1000
    label_limit: int | None = 4_000


def solve_within(importance: Any, t_dw: Any, t_dy: Any, model: ByteModel, limits: Limits) -> BoundedSelection:
    """Select the most important tensors whose backward pass fits a time and a memory budget.

    Args:
        importance, t_dw, t_dy: as for ``select``.
        model: bytes of each tensor, from ``byte_model``.
        limits: the two budgets.

    Returns:
        The selection, within both budgets. It equals that of ``select`` if that fits the memory. It is the best one
        whose rounded times fit, unless the label limit was reached, which its bound reports.

    Raises:
        UsageError: arrays of different lengths, negative times or budgets, NaN anywhere.
    """
    importance = checks.importances(importance)
    mask = select(importance, t_dw, t_dy, limits.seconds, limits.resolution)
    if len(model.own) != len(mask):
        raise UsageError(f"own_bytes has length {len(model.own)}, but there are {len(mask)} tensors.")
    limit = checks.budget("memory_bytes", limits.memory_bytes)
    if model.of(mask) <= limit:
        value = float(importance[mask].sum())
        return BoundedSelection(mask, value, value, 0)
    steps = quantise(checks.seconds("t_dw", t_dw), checks.seconds("t_dy", t_dy), limits.seconds, limits.resolution)
    problem = knapsacks(importance, steps, model, int(limit))
    if not len(problem.earliest):
        return BoundedSelection(mask & False, 0.0, 0.0, 0)
    return _search(problem, limits.label_limit)


def _search(problem: Knapsacks, label_limit: int | None) -> BoundedSelection:
    """Search each earliest tensor whose bound exceeds the best known selection, highest bound first.

    Once the label limit has left a bound open, tensors with lower bounds are not searched: they could not lower it.
    """
    price = prices(problem, COARSE)
    values, chosen = greedy(problem, price)
    best = int(np.argmax(values))
    mask, value, bound, most = chosen[best], float(values[best]), 0.0, 0
    waiting: list[tuple[float, int]] = [(-bound, row) for row, bound in enumerate(price.bound)]
    refined: dict[int, Prices] = {}
    heapq.heapify(waiting)
    while waiting and -waiting[0][0] * SAME > max(value, bound):
        _, row = heapq.heappop(waiting)
        one = problem.rows(np.array([row]))
        if row not in refined:
            refined[row] = prices(one, FINE)
            heapq.heappush(waiting, (-min(price.bound[row], refined[row].bound[0]), row))
            continue
        branch = Branch(one, refined[row])
        found, value, dropped = branch.search(value, label_limit)
        mask, bound, most = mask if found is None else found, max(bound, dropped), max(most, branch.most)
    return BoundedSelection(mask, value, max(value, bound), most)
