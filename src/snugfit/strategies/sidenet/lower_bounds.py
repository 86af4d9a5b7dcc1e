"""What every way of running a network takes at the least, without running it: which ones are worth measuring.

A way that is refused memory leaves some behind, and looking at one takes the better part of a second: so each is looked
at once, ways that run one image alike share a look, and what cannot fit is never tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

from snugfit._core.profile import ProbeLine
from snugfit.profiling import Probe, smallest_floor
from snugfit.strategies.memory_estimates import TENSOR_TO_PROCESS
from snugfit.strategies.sidenet.configurations import Configuration

Way = tuple[Configuration, bool]
"""A configuration, and whether its gradients are held over micro-batches."""


class Looks:
    """What the ways of running a network take, at the fewest images and at the whole batch.

    Args:
        probes: of every way.
        retraining: the probe of what goes before where channels are removed; None where no way removes any.
        serves: whether a configuration differs at all from one that comes before it.
    """

    def __init__(
        self, probes: Mapping[Way, Probe], retraining: Probe | None, serves: Callable[[Configuration], bool]
    ) -> None:
        self.probes, self.retraining, self.serves = probes, retraining, serves
        self._fewest: dict[Way, int] = {}
        self._whole: dict[Way, int] = {}

    def fewest(self, way: Way) -> int:
        """Bytes of a step with the fewest images, the phase before it included: image by image makes none less."""
        configuration, hold = way
        alike = (replace(configuration, by_sample=False), hold)
        way = alike if alike in self.probes else way
        if way not in self._fewest:
            found = _process_bytes(smallest_floor(self.probes[way].floor)[1])
            self._fewest[way] = max(found, self._before) if configuration.pruned else found
        return self._fewest[way]

    def whole(self, way: Way) -> int:
        """Bytes of a step with the whole batch."""
        if way not in self._whole:
            probe = self.probes[way]
            self._whole[way] = _process_bytes(probe.floor(probe.batch_limit))
        return self._whole[way]

    @cached_property
    def _before(self) -> int:
        return _process_bytes(smallest_floor(self.retraining.floor)[1]) if self.retraining is not None else 0

    @cached_property
    def least(self) -> Way:
        """The way that takes the least with the fewest images: of the narrowest side network, as small as may be."""
        holds = any(hold for _, hold in self.probes)
        ways = [way for way in self.probes if way[1] == holds and self.serves(way[0])]
        small = min(way[0].side_width for way in ways)
        coded = any(way[0].int8 for way in ways)
        ways = [way for way in ways if way[0].side_width == small and way[0].int8 == coded]
        return min(ways, key=self.fewest)

    def may_fit(self, way: Way, headroom: float, lines: Mapping[str, ProbeLine]) -> bool:
        """Whether a way is expected to fit so many bytes, or is the last that may: then it is tried where it could.

        Args:
            way: the way.
            headroom: bytes for a step and for what measuring leaves behind.
            lines: as measured so far: the first of them leaves the most behind.
        """
        if headroom == float("inf"):
            return True
        headroom -= 0 if lines else self.probes[way].growth_bytes
        if self.fewest(self.least) > headroom:
            return way == self.least
        if not self._fewest_fit(way, headroom):
            return False
        holds = any(hold for _, hold in self.probes)
        return way[1] or not holds or self.whole(way) <= headroom

    def _fewest_fit(self, way: Way, headroom: float) -> bool:
        """Whether the fewest images fit; a wider side network takes no less than a narrower one."""
        configuration, hold = way
        if configuration.pruned and self._before > headroom:
            return False
        narrowest = replace(configuration, side_width=min(each.side_width for each, _ in self.probes))
        return self.fewest((narrowest, hold)) <= headroom and self.fewest(way) <= headroom


def _process_bytes(tensor_bytes: int) -> int:
    return int(tensor_bytes * TENSOR_TO_PROCESS)
