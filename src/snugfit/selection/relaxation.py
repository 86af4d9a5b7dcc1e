"""Upper bounds on the importance of selections with a given earliest tensor, for all earliest tensors at once.

With the earliest tensor fixed, the cost of passing the gradient is fixed, and the rest is a knapsack with two limits.
Both are put into the objective at prices, in importance per step of time and per byte. The sign of each tensor's
importance minus its price decides whether it is taken, and any prices give an upper bound (Lagrangian duality). The
prices are chosen to make it nearly the smallest. Tensors that share a saved input form a group, which pays for the
input once.

Shapes: E earliest tensors (rows), N tensors, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from snugfit.selection.checks import Floats, Integers, Mask
from snugfit.selection.cost_model import ByteModel
from snugfit.selection.quantise import Steps

COARSE, FINE = 8, 12
"""Number of bisections of a price's range: enough to rank the earliest tensors, and enough to search one."""


@dataclass(frozen=True)
class Knapsacks:
    """One knapsack with two limits for each earliest tensor from which something fits.

    Attributes:
        earliest: the earliest tensors, (E,).
        time, memory: steps and bytes left for the tensors after it, (E,).
        allowed: which tensors may be added to it, (E, N).
        value: importance, (N,).
        update: steps, (N,).
        own: bytes, (N,), including the saved input if no other tensor shares it.
        group: the group of tensors with the same saved input, (N,), or -1.
        joint: bytes of each group's saved input, (E, G); 0 if the earliest tensor has paid for it.
    """

    earliest: Integers
    time: Integers
    memory: Integers
    allowed: Mask
    value: Floats
    update: Integers
    own: Integers
    group: Integers
    joint: Integers

    def rows(self, kept: Mask | Integers) -> Knapsacks:
        """Only some of the knapsacks, by mask (E,) or index."""
        by_row = ("earliest", "time", "memory", "allowed", "joint")
        return replace(self, **{name: getattr(self, name)[kept] for name in by_row})


def knapsacks(importance: Floats, steps: Steps, model: ByteModel, memory_bytes: int) -> Knapsacks:
    """Fix each tensor with importance above 0 as the earliest in turn, if anything fits with it."""
    worthwhile = importance > 0
    members = np.bincount(model.inputs[worthwhile & (model.inputs >= 0)], minlength=len(model.input_bytes))
    shared = np.flatnonzero(members > 1)
    group = np.full(len(importance), -1)
    for index, saved in enumerate(shared):
        group[model.inputs == saved] = index
    alone = np.where(model.inputs >= 0, np.append(model.input_bytes, 0)[model.inputs], 0)
    own = model.own + np.where(group < 0, alone, 0)
    first_bytes = np.cumsum(model.passing[::-1])[::-1] - model.passing + model.own + alone
    earliest = np.flatnonzero(worthwhile & (steps.first <= steps.resolution) & (first_bytes <= memory_bytes))
    time, memory = steps.resolution - steps.first[earliest], memory_bytes - first_bytes[earliest]
    paid = group[earliest][:, None] == np.arange(len(shared))
    joint = np.where(paid, 0, model.input_bytes[shared])
    entry = own + np.where(group >= 0, np.append(joint, np.zeros((len(earliest), 1), int), 1)[:, group], 0)
    allowed = worthwhile & (np.arange(len(importance)) > earliest[:, None])
    allowed &= (steps.update <= time[:, None]) & (entry <= memory[:, None])
    return Knapsacks(earliest, time, memory, allowed, importance, steps.update, own, group, joint)


@dataclass(frozen=True)
class Prices:
    """Importance per step and per byte, (E,) each, and the upper bound (E,) that they give."""

    step: Floats
    byte: Floats
    bound: Floats


def prices(problem: Knapsacks, halvings: int) -> Prices:
    """The prices with nearly the smallest bound, by nested bisection: the byte's outside, the step's inside.

    The bound is convex in both prices; its slope in one of them is the unused part of that budget.
    """
    dual = _Dual(problem, halvings)
    low, high = np.zeros(len(problem.earliest)), dual.ceiling(problem.memory)
    dual.settle_step(low)
    for _ in range(halvings):
        middle = (low + high) / 2
        overfull = dual.settle_step(middle) > problem.memory
        low, high = np.where(overfull, middle, low), np.where(overfull, high, middle)
    return Prices(dual.best_step, dual.best_byte, dual.best_bound)


class _Dual:
    """The bound as a function of the prices; keeps the best one of each row."""

    def __init__(self, problem: Knapsacks, halvings: int) -> None:
        self.problem, self.halvings = problem, halvings
        self.grouped = (problem.group[:, None] == np.arange(problem.joint.shape[1])).astype(float)
        self.single = (problem.group < 0).astype(float)
        self.costs = np.stack([problem.update, problem.own], 1).astype(float)
        rows = len(problem.earliest)
        self.best_step, self.best_byte, self.best_bound = np.zeros(rows), np.zeros(rows), np.full(rows, np.inf)

    def ceiling(self, capacity: Integers) -> Floats:
        """Upper limit (E,) of a price at the smallest bound: all importance for the capacity."""
        total = self.problem.allowed @ self.problem.value
        return total / np.maximum(capacity, 1)

    def settle_step(self, byte: Floats) -> Floats:
        """Find the best price of a step for given prices of a byte; returns the bytes (E,) used there.

        At the best price one tensor is worth exactly its price. The mixture of the uses with and without it that fills
        the time counts.
        """
        low, high = np.zeros(len(byte)), self.ceiling(self.problem.time)
        time_low, bytes_low = self.use(low, byte)
        time_high, bytes_high = self.use(high, byte)
        for _ in range(self.halvings):
            middle = (low + high) / 2
            time, used = self.use(middle, byte)
            late = time > self.problem.time
            low, high = np.where(late, middle, low), np.where(late, high, middle)
            time_low, bytes_low = np.where(late, time, time_low), np.where(late, used, bytes_low)
            time_high, bytes_high = np.where(late, time_high, time), np.where(late, bytes_high, used)
        excess, headroom = time_low - self.problem.time, self.problem.time - time_high
        share = np.clip(np.where(excess > 0, excess / np.maximum(excess + headroom, 1e-300), 0), 0, 1)
        return np.where(excess > 0, share * bytes_high + (1 - share) * bytes_low, bytes_low)

    def use(self, step: Floats, byte: Floats) -> tuple[Floats, Floats]:
        """Steps and bytes (E,) of the tensors that are worth their price; also records the bound."""
        problem = self.problem
        surplus = problem.value - step[:, None] * self.costs[:, 0] - byte[:, None] * self.costs[:, 1]
        surplus = np.where(problem.allowed, np.maximum(surplus, 0), 0)
        group_surplus = surplus @ self.grouped - byte[:, None] * problem.joint
        opened = group_surplus > 0
        taken = (surplus > 0).astype(float)
        if opened.shape[1]:
            taken *= (problem.group < 0) | (opened @ self.grouped.T > 0)
        used = taken @ self.costs
        memory = used[:, 1] + (opened * problem.joint).sum(1)
        worth = problem.value[problem.earliest] + surplus @ self.single
        worth += np.maximum(group_surplus, 0).sum(1)
        bound = worth + step * problem.time + byte * problem.memory
        better = bound < self.best_bound
        self.best_step = np.where(better, step, self.best_step)
        self.best_byte = np.where(better, byte, self.best_byte)
        self.best_bound = np.where(better, bound, self.best_bound)
        return used[:, 0], memory


def greedy(problem: Knapsacks, price: Prices) -> tuple[Floats, Mask]:
    """A fitting selection for each row, in order of importance per price: value (E,) and tensors (E, N)."""
    rows = np.arange(len(problem.earliest))
    cost = price.step[:, None] * problem.update + price.byte[:, None] * problem.own
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(-np.where(problem.allowed, problem.value / cost, -1), axis=1, kind="stable")
    time, memory = problem.time.copy(), problem.memory.copy()
    unpaid = np.append(problem.joint, np.zeros((len(rows), 1), np.int64), 1)  # the last column stands for "no group"
    chosen = np.zeros(problem.allowed.shape, bool)
    chosen[rows, problem.earliest] = True
    for tensor in order.T:
        need = problem.own[tensor] + unpaid[rows, problem.group[tensor]]
        fits = problem.allowed[rows, tensor] & (problem.update[tensor] <= time) & (need <= memory)
        chosen[rows, tensor] |= fits
        time = time - np.where(fits, problem.update[tensor], 0)
        memory = memory - np.where(fits, need, 0)
        unpaid[rows[fits], problem.group[tensor[fits]]] = 0
    return chosen @ problem.value, chosen
