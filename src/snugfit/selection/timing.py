"""Seconds of a training step with a selection of tensors, held against whole steps that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from snugfit._core.tensors import StepSeconds
from snugfit.selection.network import Mask, Network
from snugfit.selection.time_model import least_seconds

_ROUNDING = 1e-9
"""Share by which sums in another order may differ: at a rho of 1 everything fits."""


@dataclass(frozen=True)
class StepTimes:
    """The time model of a network (sections 2.2 and 3.3), between two measured anchors.

    Operators that are timed alone find their input in the cache and share the memory bus with nobody. So the sum over
    them is scaled such that it agrees with the two whole steps that were measured, the least one (the classifier
    trains) and the largest one (everything trains); a selection lies between them.
    """

    network: Network

    @cached_property
    def everything(self) -> Mask:
        """All tensors."""
        return np.ones(len(self.network.tensors), dtype=bool)

    @cached_property
    def _anchors(self) -> StepSeconds:
        """Whole steps at the network's batch: updates take the same whatever the batch, all else grows with it."""
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
        """Measured over modelled seconds between the two anchors."""
        modelled = self.network.backward_seconds(self.everything) - self.network.backward_seconds(self.network.head)
        measured = self._anchors.full - self._anchors.head
        return measured / modelled if modelled > 0 and measured > 0 else 1.0

    @property
    def full(self) -> float:
        """T_full: seconds of a step of stock autograd that trains everything."""
        return self._anchors.stock

    @property
    def least(self) -> float:
        """Seconds of a step that trains the classifier alone."""
        return self._anchors.head

    def step_seconds(self, mask: Mask) -> float:
        """Predicted seconds of a step with this selection, (N,) bool, which holds the classifier."""
        network = self.network
        added = network.backward_seconds(mask) - network.backward_seconds(network.head)
        return self._anchors.head + self._scale * added

    def ratio(self, mask: Mask) -> float:
        """Predicted step time over that of full training."""
        return self.step_seconds(mask) / self.full

    def backward_budget(self, ratio: float) -> float:
        """Unscaled seconds that tensors before the classifier may take in the chain of tensors for a ratio rho.

        The classifier always trains, so what it takes is in the least step already; and as
        soon as any other tensor is selected, the gradient passes through it. Negative where rho is too small for that.
        """
        headroom = (ratio * self.full - self._anchors.head) / self._scale
        return (headroom - self._first_pass) * (1 + _ROUNDING)

    @cached_property
    def _first_pass(self) -> float:
        """Seconds to carry the gradient through the classifier, which no step needs that trains it alone."""
        network = self.network
        return float(network.t_dy[int(np.argmax(network.head))]) if network.head.any() else 0.0

    @property
    def smallest_ratio(self) -> float:
        """Smallest rho at which a tensor beside the classifier can be trained; infinite where there is none."""
        return self.smallest_ratio_for(self.everything)

    def smallest_ratio_for(self, wanted: np.ndarray) -> float:
        """Smallest rho at which one of the tensors above 0, (N,), can be trained beside the classifier."""
        network, others = self.network, ~self.network.head
        needed = least_seconds(network.t_dw[others], network.t_dy[others], wanted[others]) + self._first_pass
        return (self._anchors.head + self._scale * needed) / self.full
