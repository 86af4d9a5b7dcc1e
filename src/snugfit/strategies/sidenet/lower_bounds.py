"""Lower bounds on the memory of each variant of the network, computed on the meta device.

They decide which variants are worth measuring. A measurement that runs out of memory leaves some memory behind, and
computing a bound takes most of a second. So each bound is computed once, variants with the same step of one image share
it, and a variant that cannot fit is never measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

from snugfit._core.profile import ProbeLine
from snugfit.profiling import Probe, smallest_floor
from snugfit.strategies.memory_estimates import TENSOR_TO_PROCESS
from snugfit.strategies.sidenet.configurations import Configuration

Variant = tuple[Configuration, bool]
"""A configuration, and whether its gradients are held over micro-batches."""


class LowerBounds:
    """Lower bounds on the process memory of each variant, at the smallest and at the full batch.

    ``retraining`` is the probe of the phase that retrains a pruned network. ``applies`` says whether a configuration
    differs from those before it, for this network.
    """

    def __init__(
        self, probes: Mapping[Variant, Probe], retraining: Probe | None, applies: Callable[[Configuration], bool]
    ) -> None:
        self.probes, self.retraining, self.applies = probes, retraining, applies
        self._smallest: dict[Variant, int] = {}
        self._full: dict[Variant, int] = {}

    def smallest_batch_bytes(self, variant: Variant) -> int:
        """Bytes of a step at the smallest batch, or of retraining if that is more.

        Running image by image makes no difference to a single image.
        """
        configuration, hold = variant
        whole = (replace(configuration, by_sample=False), hold)
        variant = whole if whole in self.probes else variant
        if variant not in self._smallest:
            found = _process_bytes(smallest_floor(self.probes[variant].floor)[1])
            self._smallest[variant] = max(found, self._retraining_bytes) if configuration.pruned else found
        return self._smallest[variant]

    def full_batch_bytes(self, variant: Variant) -> int:
        """Bytes of a step at the full batch."""
        if variant not in self._full:
            probe = self.probes[variant]
            self._full[variant] = _process_bytes(probe.floor(probe.batch_limit))
        return self._full[variant]

    @cached_property
    def _retraining_bytes(self) -> int:
        return _process_bytes(smallest_floor(self.retraining.floor)[1]) if self.retraining is not None else 0

    @cached_property
    def smallest(self) -> Variant:
        """The variant with the least memory at the smallest batch, among those with the narrowest side network."""
        holds = any(hold for _, hold in self.probes)
        found = [variant for variant in self.probes if variant[1] == holds and self.applies(variant[0])]
        width = min(configuration.side_width for configuration, _ in found)
        int8 = any(configuration.int8 for configuration, _ in found)
        found = [variant for variant in found if variant[0].side_width == width and variant[0].int8 == int8]
        return min(found, key=self.smallest_batch_bytes)

    def may_fit(self, variant: Variant, headroom: float, lines: Mapping[str, ProbeLine]) -> bool:
        """Whether a variant may fit in ``headroom`` bytes; if none fits, whether it is the smallest.

        The headroom is for a step and for what measuring leaves behind; the first of the ``lines`` leaves the most.
        """
        if headroom == float("inf"):
            return True
        headroom -= 0 if lines else self.probes[variant].growth_bytes
        if self.smallest_batch_bytes(self.smallest) > headroom:
            return variant == self.smallest
        if not self._smallest_batch_fits(variant, headroom):
            return False
        holds = any(hold for _, hold in self.probes)
        return variant[1] or not holds or self.full_batch_bytes(variant) <= headroom

    def _smallest_batch_fits(self, variant: Variant, headroom: float) -> bool:
        """Whether the smallest batch fits; a wider side network takes no less than a narrower one."""
        configuration, hold = variant
        if configuration.pruned and self._retraining_bytes > headroom:
            return False
        narrowest = replace(configuration, side_width=min(each.side_width for each, _ in self.probes))
        narrowest_fits = self.smallest_batch_bytes((narrowest, hold)) <= headroom
        return narrowest_fits and self.smallest_batch_bytes(variant) <= headroom


def _process_bytes(tensor_bytes: int) -> int:
    return int(tensor_bytes * TENSOR_TO_PROCESS)
