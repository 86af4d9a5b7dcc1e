"""The Tensor Selector: the best selection within a time ratio and, where there is one, a memory budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from snugfit.selection.memory import step_bytes
from snugfit.selection.network import Mask, Network
from snugfit.selection.pareto import select_within
from snugfit.selection.solver import select
from snugfit.selection.timing import StepTimes

RESOLUTION = 1000
"""Steps that the time budget is divided into (section 6.3: T_q = 10^3)."""
_TRIES = 12


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
    if not len(others) or seconds <= 0:
        return chosen
    value, t_dw, t_dy = importance[others], network.t_dw[others], network.t_dy[others]
    if room.bytes is None:
        chosen[others] = select(value, t_dw, t_dy, seconds, RESOLUTION)
        return chosen
    own = memory.own_bytes[others] + (memory.gradient_bytes[others] if room.holds_gradients else 0)
    inputs, input_bytes = memory.shared_inputs(others)
    allowed = float(room.bytes - memory.state_bytes(chosen))  # too much at first: maps that pass by need some
    for _ in range(_TRIES):
        if allowed <= 0:
            break
        found: Mask = chosen.copy()
        found[others] = select_within(
            value, t_dw, t_dy, seconds, own, inputs, input_bytes, memory.pass_bytes[others], int(allowed), RESOLUTION
        )
        excess = needed_bytes(memory, found, room) - room.bytes
        if excess <= 0:
            return found
        allowed -= max(excess, 0.02 * allowed)
    return chosen


def needed_bytes(memory: Network, mask: Mask, room: Room) -> int:
    """Peak bytes of a step with a selection: maps, gradients and optimizer state, without weights."""
    return memory.state_bytes(mask) + step_bytes(memory, mask, holds_gradients=room.holds_gradients)
