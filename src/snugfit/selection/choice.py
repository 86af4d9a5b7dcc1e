"""The Tensor Selector: the best selection within a time ratio and an optional memory budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from snugfit.selection.cost_model import byte_model, fits
from snugfit.selection.network import Mask, Network, step_bytes
from snugfit.selection.pareto import Limits, solve_within
from snugfit.selection.solver import select
from snugfit.selection.timing import StepTimes

RESOLUTION = 1000
"""Steps of the time budget if there is a memory budget too (section 6.3: T_q = 10^3)."""
TIME_RESOLUTION = 4000
"""Steps without a memory budget: rounding costs 1.7-3.6 % of the importance at 1000 steps and 0.5-1 % at 4000, for 161
tensors and log-normal importances, and the program takes milliseconds either way."""
_TRIES = 12
_CLOSE = 0.01
"""Share of the headroom to which the tensors' allowance is found."""


@dataclass(frozen=True)
class Headroom:
    """The budgets of a selection: rho, its step time over that of full training, and peak bytes, None for no limit.

    ``holds_gradients``: gradients accumulate over micro-batches.
    """

    ratio: float
    bytes: int | None = None
    holds_gradients: bool = False


def choose(times: StepTimes, memory: Network, importance: np.ndarray, headroom: Headroom) -> Mask:
    """Select the most important tensors that the headroom holds; the classifier is always among them.

    Args:
        times: the time model, at the effective batch.
        memory: the same network at the micro-batch, whose feature maps are in memory at once.
        importance: (N,), in the network's order.
        headroom: the budgets.
    """
    network = times.network
    chosen: Mask = network.head.copy()
    others = np.flatnonzero(~network.head)
    seconds = times.backward_budget(headroom.ratio)
    if not len(others) or seconds < 0:
        return chosen
    value, t_dw, t_dy = importance[others], network.t_dw[others], network.t_dy[others]
    free: Mask = chosen.copy()
    free[others] = select(value, t_dw, t_dy, seconds, TIME_RESOLUTION)
    if headroom.bytes is None or needed_bytes(memory, free, headroom) <= headroom.bytes:
        return free
    own = memory.own_bytes[others] + (memory.gradient_bytes[others] if headroom.holds_gradients else 0)
    model = byte_model(own, *memory.shared_inputs(others), memory.pass_bytes[others])

    def within(allowed: float) -> tuple[Mask, int]:
        found: Mask = chosen.copy()
        limits = Limits(seconds, int(allowed), RESOLUTION)
        found[others] = solve_within(value, t_dw, t_dy, model, limits).mask
        return found, model.of(found[others])

    def fits_too(mask: Mask) -> bool:
        in_time = fits(mask[others], t_dw, t_dy, seconds)
        return in_time and needed_bytes(memory, mask, headroom) <= (headroom.bytes or 0)

    return _filled(_most(within, memory, importance, headroom), importance, fits_too)


def _filled(mask: Mask, importance: np.ndarray, fits_too: Callable[[Mask], bool]) -> Mask:
    """Add tensors to a selection (N,) in order of importance as long as it stays within both budgets.

    The bytes of tensors alone do not decide which step fits, so that ``_most`` may miss some that do.
    """
    for tensor in np.argsort(-importance, kind="stable"):
        if mask[tensor] or importance[tensor] <= 0:
            continue
        more = mask.copy()
        more[tensor] = True
        if fits_too(more):
            mask = more
    return mask


def _most(
    within: Callable[[float], tuple[Mask, int]], memory: Network, importance: np.ndarray, headroom: Headroom
) -> Mask:
    """The best selection whose step fits, searched over the allowance for the tensors alone.

    Feature maps between tensors need headroom, depending on the selection. So the allowance falls by what a step lacks
    until one fits, and then rises halfway back as long as tries are left. ``within`` returns the best selection for an
    allowance in bytes, and the bytes that it uses.
    """
    best: Mask = memory.head.copy()
    limit = headroom.bytes or 0
    low, allowed = 0.0, float(limit - memory.state_bytes(best))
    high = allowed
    for attempt in range(_TRIES):
        if allowed <= 0:
            break
        found, taken = within(allowed)
        excess = needed_bytes(memory, found, headroom) - limit
        if excess <= 0:
            if importance[found].sum() >= importance[best].sum():
                best = found
            low = allowed
            if high - low <= _CLOSE * limit:
                break
            allowed = (low + high) / 2
            continue
        high = min(allowed, taken)
        lower = high - max(excess, 0.02 * high)
        allowed = lower if low == 0 and attempt < _TRIES // 2 and lower > 0 else (low + high) / 2
    return best


def needed_bytes(memory: Network, mask: Mask, headroom: Headroom) -> int:
    """Peak bytes of a step with a selection: feature maps, gradients and optimizer state, without weights."""
    return memory.state_bytes(mask) + step_bytes(memory, mask, holds_gradients=headroom.holds_gradients)
