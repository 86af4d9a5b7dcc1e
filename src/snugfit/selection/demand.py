"""The most memory that a selection within a time budget can ask for."""

from __future__ import annotations

from typing import Any

import numpy as np

from snugfit.selection import checks
from snugfit.selection.byte_model import byte_model
from snugfit.selection.quantise import quantise
from snugfit.selection.time_model import backward_seconds


def maximum_bytes(
    t_dw: Any,
    t_dy: Any,
    seconds: float,
    own_bytes: Any,
    inputs: Any,
    input_bytes: Any,
    pass_bytes: Any,
    resolution: int = 1000,
) -> int:
    """An upper bound on the bytes of every selection whose backward pass takes at most ``seconds``.

    Importances change while a network trains, its times and bytes do not, so this is what a plan without a memory limit
    must provide for. It is the dynamic programme of ``solver`` with bytes for importance. Every tensor pays for its
    saved input alone, and times are rounded down, both of which can only raise the bound.

    Args:
        t_dw: seconds to compute and apply each tensor's update, (N,).
        t_dy: seconds to carry the error gradient past each tensor, (N,).
        seconds: what the backward pass may take.
        own_bytes: each tensor's gradient and optimizer state, (N,).
        inputs: which saved input each tensor's update reads, (N,), an index into ``input_bytes``, -1 for none.
        input_bytes: bytes of the saved inputs, (M,).
        pass_bytes: bytes that the gradient needs to pass each tensor, (N,), charged after the earliest selected one.
        resolution: steps of the time budget.

    Raises:
        UsageError: arrays of different lengths, negative times, bytes or budget, NaN anywhere.
    """
    model = byte_model(own_bytes, inputs, input_bytes, pass_bytes)
    count = len(model.own)
    t_dw, t_dy = checks.seconds("t_dw", t_dw, count), checks.seconds("t_dy", t_dy, count)
    budget, resolution = checks.budget("seconds", seconds), checks.steps(resolution)
    everything = np.ones(count, bool)
    if backward_seconds(everything, t_dw, t_dy) <= budget:
        return model.of(everything)
    steps = quantise(t_dw, t_dy, budget, resolution)
    update, first = np.maximum(steps.update - 1, 0), np.maximum(steps.first - 1, 0)
    need = model.own + np.where(model.inputs >= 0, np.append(model.input_bytes, 0)[model.inputs], 0)
    after, passed, most = np.zeros(resolution + 1, np.int64), 0, 0
    for k in range(count - 1, -1, -1):
        if steps.first[k] <= resolution:
            most = max(most, int(need[k] + passed + after[resolution - first[k]]))
        cost = int(update[k])
        after[cost:] = np.maximum(after[cost:], after[: resolution + 1 - cost] + need[k])
        passed += int(model.passing[k])
    return min(most, model.of(everything))
