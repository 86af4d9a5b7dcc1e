"""Seconds and bytes of the backward pass with a selection of tensors (ElasticTrainer sections 2.2 and 3.3).

Tensors are in order of execution: index 0 is nearest the input. Tensor k takes ``t_dw[k]`` seconds to compute and apply
its update, and ``t_dy[k]`` to pass the error gradient to tensor k - 1. The gradient travels from the output to the
earliest selected tensor and no further. So a selection costs ``t_dw`` for each selected tensor and ``t_dy`` for every
tensor after the earliest. The earliest's own ``t_dy`` is not charged: section 2.2's example and equation 7 leave it
out, f(M) of section 3.3 does not, and no backward pass computes it.

Sums are exact and rounded once, so a selection whose true time is within a budget is never judged beyond it.

An unselected tensor costs no gradient, no optimizer state and no saved activation (ElasticTrainer decision 7). So
memory depends on the selection in the same way as time: own bytes for each selected tensor, bytes of the layers without
tensors that the gradient passes on its way to the earliest one, and the saved inputs. An input that two tensors save
(the first convolution of a residual block and that on its shortcut) counts once, whichever of them is selected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from snugfit.errors import UsageError
from snugfit.selection import checks
from snugfit.selection.checks import Floats, Integers, Mask


def backward_seconds(mask: Any, t_dw: Any, t_dy: Any) -> float:
    """Seconds of the backward pass that trains the tensors of ``mask`` (N,) (equation 3 without the forward pass).

    An empty selection takes 0 seconds; ``t_dw`` and ``t_dy`` are as for ``select``.

    Raises:
        UsageError: arrays of different lengths, or times that are negative or not finite.
    """
    t_dw = checks.seconds("t_dw", t_dw)
    t_dy = checks.seconds("t_dy", t_dy, len(t_dw))
    return math.fsum(_terms(checks.mask(mask, len(t_dw)), t_dw, t_dy))


def fits(mask: Mask, t_dw: Floats, t_dy: Floats, budget_seconds: float) -> bool:
    """Whether the exact sum behind ``backward_seconds`` is within the budget; all arrays (N,) and checked."""
    return math.fsum([*_terms(mask, t_dw, t_dy), -budget_seconds]) <= 0


def _terms(mask: Mask, t_dw: Floats, t_dy: Floats) -> Floats:
    chosen = np.flatnonzero(mask)
    return np.concatenate([t_dw[chosen], t_dy[chosen[0] + 1 :] if len(chosen) else t_dy[:0]])


def least_seconds(t_dw: Any, t_dy: Any, importance: Any = None) -> float:
    """The smallest budget in which one tensor can be trained; an error names it as the nearest working value.

    ``t_dw`` and ``t_dy`` are as for ``select``. If ``importance`` (N,) is given, only tensors above 0 count, because no
    other is ever selected.

    Returns:
        Seconds, rounded up; infinite if there is no tensor to select.

    Raises:
        UsageError: arrays of different lengths, or values that are not valid times.
    """
    t_dw = checks.seconds("t_dw", t_dw)
    t_dy = checks.seconds("t_dy", t_dy, len(t_dw))
    eligible = np.ones(len(t_dw), bool) if importance is None else checks.importances(importance) > 0
    if len(eligible) != len(t_dw):
        raise UsageError(f"importance has length {len(eligible)}, but there are {len(t_dw)} tensors.")
    passing = exact_passing(t_dy)
    exact = min((Fraction(t_dw[k]) + passing[k] for k in np.flatnonzero(eligible)), default=None)
    if exact is None:
        return math.inf
    rounded = float(exact)
    return rounded if Fraction(rounded) >= exact else math.nextafter(rounded, math.inf)


def exact_passing(t_dy: Floats) -> list[Fraction]:
    """Exact sums of ``t_dy`` (N,) after each tensor, which the gradient passes on its way to it (equation 7)."""
    sums, total = [Fraction(0)] * len(t_dy), Fraction(0)
    for index in range(len(t_dy) - 1, -1, -1):
        sums[index] = total
        total += Fraction(t_dy[index])
    return sums


@dataclass(frozen=True)
class ByteModel:
    """Bytes of N tensors in the order of execution, index 0 nearest the input.

    Attributes:
        own: each tensor's gradient and optimizer state, (N,).
        inputs: which saved input each tensor's update reads, (N,), an index into ``input_bytes``; -1 for none.
        input_bytes: bytes of the saved inputs, (M,).
        passing: bytes that the gradient needs to pass each tensor, (N,); like ``t_dy`` they are charged after the
            earliest selected tensor.
    """

    own: Integers
    inputs: Integers
    input_bytes: Integers
    passing: Integers

    def of(self, mask: Mask) -> int:
        """Bytes that the selection ``mask`` (N,) needs; 0 for none."""
        chosen = np.flatnonzero(mask)
        if not len(chosen):
            return 0
        saved = np.unique(self.inputs[chosen])
        passed = self.passing[chosen[0] + 1 :]
        return int(self.own[chosen].sum() + self.input_bytes[saved[saved >= 0]].sum() + passed.sum())


def byte_model(own_bytes: Any, inputs: Any, input_bytes: Any, pass_bytes: Any) -> ByteModel:
    """Build a ``ByteModel`` from checked arrays. Raises UsageError for invalid lengths, indices or bytes."""
    own = checks.byte_counts("own_bytes", own_bytes)
    indices = checks.whole("inputs", inputs, len(own))
    saved = checks.byte_counts("input_bytes", input_bytes)
    if np.any((indices < -1) | (indices >= len(saved))):
        raise UsageError(f"inputs names an input other than -1 (none) and 0 to {len(saved) - 1}.")
    return ByteModel(own, indices, saved, checks.byte_counts("pass_bytes", pass_bytes, len(own)))
