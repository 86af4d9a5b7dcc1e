"""The Tensor Selector: the best selection within a time ratio and, where there is one, a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from snugfit.selection.memory import step_bytes
from snugfit.selection.network import Mask, Network
from snugfit.selection.pareto import select_within
from snugfit.selection.solver import select
from snugfit.selection.timing import StepTimes

RESOLUTION = 1000
"""Steps that the time budget is divided into beside a memory budget (section 6.3: T_q = 10^3)."""
TIME_RESOLUTION = 4000
"""Steps where time alone binds: rounding costs 1.7-3.6 % of the importance at 1000 steps and 0.5-1 % at 4000, for 161
tensors and importances drawn log-normally, and the programme takes milliseconds either way."""
_TRIES = 9


@dataclass(frozen=True)
class Room:
    """What a selection may take.

    Attributes:
        ratio: rho, step time over that of full training.
        bytes: peak bytes of maps, gradients and optimizer state; None is unlimited.
        holds_gradients: whether gradients accumulate over micro-batches.
    """

    ratio: float
    bytes: int | None = None
    holds_gradients: bool = False


def choose(times: StepTimes, memory: Network, importance: np.ndarray, room: Room) -> Mask:
    """The most important tensors that the room holds; the classifier is always among them.

    Args:
        times: the time model, at the effective batch.
        memory: the same network at the micro-batch, whose maps are in memory at once.
        importance: (N,), in the network's order.
        room: the budgets.

    Returns:
        (N,) bool; the classifier alone where nothing else fits.
    """
    network = times.network
    chosen: Mask = network.head.copy()
    others = np.flatnonzero(~network.head)
    seconds = times.backward_budget(room.ratio)
    if not len(others) or seconds < 0:
        return chosen
    value, t_dw, t_dy = importance[others], network.t_dw[others], network.t_dy[others]
    free: Mask = chosen.copy()
    free[others] = select(value, t_dw, t_dy, seconds, TIME_RESOLUTION)
    if room.bytes is None or needed_bytes(memory, free, room) <= room.bytes:
        return free
    own = memory.own_bytes[others] + (memory.gradient_bytes[others] if room.holds_gradients else 0)
    inputs, input_bytes = memory.shared_inputs(others)

    def within(allowed: int) -> Mask:
        found: Mask = chosen.copy()
        found[others] = select_within(
            value, t_dw, t_dy, seconds, own, inputs, input_bytes, memory.pass_bytes[others], allowed, RESOLUTION
        )
        return found

    return _most_that_fits(within, chosen, memory, importance, room)


def _most_that_fits(
    within: Callable[[int], Mask], least: Mask, memory: Network, importance: np.ndarray, room: Room
) -> Mask:
    """The best selection whose peak, followed through the operators, is in the room.

    The solver adds up what every tensor keeps. Maps that come and go before and after need some of the room too, and
    how much depends on the selection: so the bytes that the solver may give out are found by bisection.
    """
    best, low, high = least, 0, int(room.bytes or 0) - memory.state_bytes(least)
    attempt = high
    for _ in range(_TRIES):
        if attempt <= 0:
            break
        found = within(attempt)
        if needed_bytes(memory, found, room) <= int(room.bytes or 0):
            low = attempt
            if importance[found].sum() > importance[best].sum() or not (best & ~least).any():
                best = found
        else:
            high = attempt
        if low == high:
            break
        attempt = (low + high) // 2
    return best


def needed_bytes(memory: Network, mask: Mask, room: Room) -> int:
    """Peak bytes of a step with a selection: maps, gradients and optimizer state, without weights."""
    return memory.state_bytes(mask) + step_bytes(memory, mask, holds_gradients=room.holds_gradients)
