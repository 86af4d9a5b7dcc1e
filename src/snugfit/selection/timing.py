"""Seconds of a training step with a selection of tensors, calibrated by whole steps that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from snugfit._core.profile import StepSeconds
from snugfit.selection.cost_model import least_seconds
from snugfit.selection.network import Mask, Network

_ROUNDING = 1e-9
"""Relative difference that another order of summation may cause: at a rho of 1 everything fits."""


@dataclass(frozen=True)
class StepTimes:
    """The time model of a network (sections 2.2 and 3.3), between two measured anchors.

    Operators that are timed alone find their input in the cache and do not share the memory bus. So their sum is scaled
    to match the two whole steps that were measured: the smallest one (only the classifier trains) and the largest one
    (everything trains). A selection lies between them.
    """

    network: Network

    @cached_property
    def everything(self) -> Mask:
        """All tensors."""
        return np.ones(len(self.network.tensors), dtype=bool)

    @cached_property
    def _anchors(self) -> StepSeconds:
        """Whole steps at the network's batch: updates take the same at any batch, everything else grows with it."""
        measured, network = self.network.profile.steps, self.network
        if measured is None:
            forward = network.forward_seconds()
            full = forward + network.backward_seconds(self.everything)
            return StepSeconds(network.batch, full, full, forward + network.backward_seconds(network.head))
        growth = network.batch / measured.batch
        updates = sum(tensor.update_seconds for tensor in network.tensors)
        head = sum(t.update_seconds for t, on in zip(network.tensors, network.head, strict=True) if on)

        def grown(seconds: float, fixed: float) -> float:
            return max(seconds - fixed, 0.0) * growth + min(fixed, seconds)

        return StepSeconds(
            network.batch, grown(measured.stock, updates), grown(measured.full, updates), grown(measured.head, head)
        )

    @cached_property
    def _scale(self) -> float:
        """Ratio of measured to modelled seconds between the two anchors."""
        modelled = self.network.backward_seconds(self.everything) - self.network.backward_seconds(self.network.head)
        measured = self._anchors.full - self._anchors.head
        return measured / modelled if modelled > 0 and measured > 0 else 1.0

    @property
    def full(self) -> float:
        """T_full: seconds of a step of stock autograd that trains everything."""
        return self._anchors.stock

    @property
    def least(self) -> float:
        """Seconds of a step that trains only the classifier."""
        return self._anchors.head

    def step_seconds(self, mask: Mask) -> float:
        """Predicted seconds of a step with this selection, (N,) bool, which includes the classifier."""
        network = self.network
        added = network.backward_seconds(mask) - network.backward_seconds(network.head)
        return self._anchors.head + self._scale * added

    def ratio(self, mask: Mask) -> float:
        """Predicted step time divided by that of full training."""
        return self.step_seconds(mask) / self.full

    def backward_budget(self, ratio: float) -> float:
        """Unscaled seconds that the chain of tensors before the classifier may take for a ratio rho.

        The classifier always trains, so its time is part of the smallest step. As soon as any other tensor is selected,
        the gradient passes through it. The result is negative if rho is too small for that.
        """
        headroom = (ratio * self.full - self._anchors.head) / self._scale
        return (headroom - self._first_pass) * (1 + _ROUNDING)

    @cached_property
    def _first_pass(self) -> float:
        """Seconds to pass the gradient through the classifier, which a step that trains only that does not need."""
        network = self.network
        return float(network.t_dy[int(np.argmax(network.head))]) if network.head.any() else 0.0

    @property
    def smallest_ratio(self) -> float:
        """Smallest rho at which a tensor besides the classifier can be trained; infinite if there is none."""
        return self.smallest_ratio_for(self.everything)

    def smallest_ratio_for(self, wanted: np.ndarray) -> float:
        """Smallest rho at which one of the tensors above 0, (N,), can be trained besides the classifier."""
        network, others = self.network, ~self.network.head
        needed = least_seconds(network.t_dw[others], network.t_dy[others], wanted[others]) + self._first_pass
        return (self._anchors.head + self._scale * needed) / self.full
