"""Bytes that a selection of tensors needs at once.

An unselected tensor costs no gradient, no optimizer state and no saved activation (ElasticTrainer decision 7). So
memory depends on the selection in the same way as time: own bytes for each selected tensor, bytes of the layers without
tensors that the gradient passes on its way to the earliest one, and the saved inputs. An input that two tensors save
(the first convolution of a residual block and that on its shortcut) counts once, whichever of them is selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from snugfit.errors import UsageError
from snugfit.selection import checks
from snugfit.selection.checks import Integers, Mask


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


def selection_bytes(mask: Any, own_bytes: Any, inputs: Any, input_bytes: Any, pass_bytes: Any) -> int:
    """Bytes that the selection ``mask`` needs; arguments as in ``ByteModel``.

    Raises:
        UsageError: arrays of different lengths, invalid indices, bytes that are negative or not numbers.
    """
    model = byte_model(own_bytes, inputs, input_bytes, pass_bytes)
    return model.of(checks.mask(mask, len(model.own)))
