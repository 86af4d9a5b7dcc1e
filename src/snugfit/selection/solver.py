"""The dynamic program that selects tensors within a time budget (ElasticTrainer section 6).

Section 6 solves P[k, t], the best selection among the k tensors nearest the output in t steps of time. If tensor k is
selected, equation 7 searches for the next selected tensor k_c, because passing the gradient from k_c to k is charged:
O(N) per subproblem, O(N^2 T_q) in total. That search is not needed, because the distance that the gradient travels
depends on the earliest selected tensor alone. Let K_k[t] be the largest importance of tensors after k whose updates
alone take at most t steps: a knapsack that one more tensor extends in O(T_q). The best selection whose earliest tensor
is k then has

    I_k + K_k[T_q - first_k],    first_k = steps of t_dw[k] + sum of t_dy[j] over j > k,

and the best of these over k is the answer, in O(N T_q).

K_k[t] is P[k, t + steps to pass the gradient to k]. The two kinds that section 6.3 skips are never solved: *invalid*
ones, beyond the budget, and *redundant* ones, whose depth k alone takes longer than their time. The walk towards the
input ends when no time is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from snugfit.selection import checks
from snugfit.selection.checks import Floats, Integers, Mask
from snugfit.selection.cost_model import fits
from snugfit.selection.quantise import Steps, quantise


@dataclass(frozen=True)
class Selection:
    """A selection (N,), and the number of subproblems of section 6.

    Attributes:
        mask: which tensors to train.
        solved: number of solved subproblems; 0, like the others, if everything worth training fits.
        invalid, redundant: number of those skipped because they lie beyond the budget, or because the gradient's way to
            their depth alone takes longer.
    """

    mask: Mask
    solved: int
    invalid: int
    redundant: int


def select(importance: Any, t_dw: Any, t_dy: Any, budget_seconds: float, resolution: int = 1000) -> Mask:
    """Select the most important tensors whose backward pass fits the budget (equation 3).

    Args:
        importance: of training each tensor, (N,); tensors at or below 0 are never selected.
        t_dw: seconds to compute and apply each tensor's update, (N,).
        t_dy: seconds to carry the error gradient past each tensor, (N,).
        budget_seconds: limit for the backward pass.
        resolution: steps of the budget to which times are rounded upward (section 6.3's T_q).

    Returns:
        The selection, (N,); ``backward_seconds`` of it never exceeds the budget. It is the best one whose rounded times
        fit, hence at least as good as any whose true time is at most ``budget_seconds * (1 - N / resolution)``. Where
        every tensor above 0 fits, times are not rounded and all of them are selected.

    Raises:
        UsageError: arrays of different lengths, times or a budget that are negative, NaN anywhere.
    """
    return solve(importance, t_dw, t_dy, budget_seconds, resolution).mask


def solve(importance: Any, t_dw: Any, t_dy: Any, budget_seconds: float, resolution: int = 1000) -> Selection:
    """Return the selection of ``select`` with the number of subproblems solved and skipped (section 6.3)."""
    importance = checks.importances(importance)
    t_dw = checks.seconds("t_dw", t_dw, len(importance))
    t_dy = checks.seconds("t_dy", t_dy, len(importance))
    budget, resolution = checks.budget("budget_seconds", budget_seconds), checks.steps(resolution)
    worthwhile: Mask = importance > 0
    if fits(worthwhile, t_dw, t_dy, budget):
        return Selection(worthwhile, 0, 0, 0)
    return _programme(importance, quantise(t_dw, t_dy, budget, resolution))


def _programme(importance: Floats, steps: Steps) -> Selection:
    """Walk from the output towards the input, extending K_k and trying each tensor as the earliest."""
    count, limit = len(importance), steps.resolution
    taken = np.zeros((count, limit + 1), bool)
    best, earliest, solved = 0.0, -1, 0
    after = np.zeros(limit + 1)
    for k in range(count - 1, -1, -1):
        left = limit - int(steps.passing[k])
        if left < 0:
            break
        solved += left + 1
        if importance[k] <= 0:
            continue
        if steps.first[k] <= limit and importance[k] + after[limit - steps.first[k]] > best:
            best, earliest = importance[k] + after[limit - steps.first[k]], k
        cost = int(steps.update[k])
        if cost <= left:
            with_k = after[: left + 1 - cost] + importance[k]
            taken[k, cost : left + 1] = with_k > after[cost : left + 1]
            after[cost : left + 1] = np.maximum(after[cost : left + 1], with_k)
    invalid = count * max(0, steps.full - limit)
    mask = np.zeros(count, bool)
    if best > 0:
        mask = _reconstruct(taken, steps.update, earliest, limit - int(steps.first[earliest]))
    return Selection(mask, solved, invalid, count * (limit + 1) - solved)


def _reconstruct(taken: Mask, update: Integers, earliest: int, left: int) -> Mask:
    """Follow the choices (N, T_q + 1) from the earliest tensor to the output, with ``left`` steps for updates."""
    mask = np.zeros(len(taken), bool)
    mask[earliest] = True
    for k in range(earliest + 1, len(taken)):
        if taken[k, left]:
            mask[k] = True
            left -= int(update[k])
    return mask
