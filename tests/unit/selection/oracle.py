"""The slow, obvious versions: every selection is tried."""

import math
from fractions import Fraction

import numpy as np


def every_mask(count):
    """All selections, (2^N, N)."""
    return (np.arange(2**count)[:, None] >> np.arange(count)) & 1 > 0


def seconds(mask, t_dw, t_dy):
    """Section 2.2 word by word, exactly."""
    chosen = [k for k in range(len(mask)) if mask[k]]
    if not chosen:
        return Fraction(0)
    updates = sum(Fraction(float(t_dw[k])) for k in chosen)
    return updates + sum(Fraction(float(t_dy[j])) for j in range(len(mask)) if j > chosen[0])


def in_steps(t_dw, t_dy, budget, resolution):
    """Steps of each update, and of each tensor's update with the way to it, rounded upward."""

    def up(time):
        return math.ceil(time * resolution / Fraction(budget)) if budget else (resolution + 1 if time else 0)

    update = [up(Fraction(float(time))) for time in t_dw]
    alone = np.eye(len(t_dw), dtype=bool)
    return update, [up(seconds(alone[k], t_dw, t_dy)) for k in range(len(t_dw))]


def steps_of_all(masks, update, first):
    """Steps of every selection, (2^N,)."""
    update, first = np.minimum(update, 10**6), np.minimum(first, 10**6)
    if masks.shape[1] == 0:
        return np.zeros(1)
    earliest = masks.argmax(1)
    return np.where(masks.any(1), masks @ update - update[earliest] + first[earliest], 0)


def seconds_of_all(masks, t_dw, t_dy):
    """Seconds of every selection in floats, (2^N,)."""
    if masks.shape[1] == 0:
        return np.zeros(1)
    way = np.append(np.cumsum(t_dy[::-1])[::-1][1:], 0.0)
    return np.where(masks.any(1), masks @ t_dw + way[masks.argmax(1)], 0)


def bytes_needed(mask, own, inputs, input_bytes, passing):
    """Bytes of one selection."""
    chosen = [k for k in range(len(mask)) if mask[k]]
    if not chosen:
        return 0
    saved = {int(inputs[k]) for k in chosen} - {-1}
    return (
        sum(int(own[k]) for k in chosen)
        + sum(int(input_bytes[i]) for i in saved)
        + sum(int(passing[j]) for j in range(chosen[0] + 1, len(mask)))
    )


def best_value(masks, importance, feasible):
    """Most importance of the feasible selections."""
    return float((masks @ importance)[feasible].max()) if masks.shape[1] else 0.0
