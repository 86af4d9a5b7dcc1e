"""Settings of ``sidenet``: the configurations they allow, their expected loss of accuracy, and which may fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

from snugfit._core.profile import ProbeLine
from snugfit._core.request import StrategyOptions
from snugfit.errors import UsageError
from snugfit.profiling import Probe, smallest_floor
from snugfit.strategies.memory_estimates import TENSOR_TO_PROCESS
from snugfit.strategies.micro_batch import MicroBatching
from snugfit.strategies.sidenet.config import SidenetOptions, SidenetScheme

PREFIX = "sidenet"
WIDTHS = (1.0, 0.5, 0.25)
"""Candidate widths of the side network if none is set."""

FEW_IMAGES, INT8, PRUNED, NARROW = 0.12, 0.2, 0.6, 1.0
"""Expected loss of accuracy in percentage points: by a side network whose BatchNorm sees half as many images as
:data:`ENOUGH` (four times that at a quarter), by weights rounded to int8 per channel, by pruning and retraining (the
paper's 65.2 -> 64.6 %, section V), and by half the width. These figures order the configurations that fit; they do not
predict accuracy."""
ENOUGH = 8
"""Images that BatchNorm of the side network needs: the batch that Rep-Net and the paper train at."""


@dataclass(frozen=True)
class Configuration:
    """How the network is stored and run; memory-bound frozen blocks may run image by image.

    The width of the side network is 0 if the scheme has none.
    """

    side_width: float = 0.0
    pruned: bool = False
    int8: bool = False
    by_sample: bool = False

    @property
    def probe(self) -> str:
        """Key of its line in a profile."""
        width = f"width {self.side_width:g}" if self.side_width else ""
        marks = ("pruned" * self.pruned, "int8" * self.int8, "by sample" * self.by_sample)
        return ":".join(filter(None, (PREFIX, width, *marks)))

    @property
    def loss(self) -> float:
        """Expected loss of accuracy in percentage points; running image by image is exact."""
        narrow = NARROW * math.log2(WIDTHS[0] / self.side_width) if self.side_width else 0.0
        return PRUNED * self.pruned + INT8 * self.int8 + max(narrow, 0.0)

    def loss_at(self, micro_batch: int, batch: int) -> float:
        """The same with ``micro_batch`` images of a batch at once, which BatchNorm of the side network sees."""
        if not self.side_width:
            return self.loss
        halvings = math.log2(max(min(ENOUGH, batch) / micro_batch, 1.0))
        return self.loss + FEW_IMAGES * halvings**2


@dataclass(frozen=True)
class SidenetSettings(SidenetOptions, MicroBatching):
    """Settings of ``sidenet``: its options, of which ``propose`` replaces those that are None or ``auto``.

    Attributes:
        retrain_batch: images in memory at once during retraining; filled in by ``propose``.
    """

    name: ClassVar[str] = "sidenet"
    exact: ClassVar[bool] = False

    scheme: SidenetScheme = "rep-net"
    retrain_batch: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheme != "rep-net" and self.prune not in ("auto", "off"):
            raise UsageError(f"--prune requires a side network, which --scheme {self.scheme} does not have.")
        if self.scheme == "bias+head" and self.sample_wise == "on":
            raise UsageError("--sample-wise on: blocks whose biases train (--scheme bias+head) cannot run by sample.")

    @staticmethod
    def leaner(options: StrategyOptions) -> Iterator[dict[str, Any]]:
        """The settings with the least memory for the options that the user left open; tried if nothing fits.

        By expected loss: first frozen weights in int8 and large feature maps image by image; then also the narrowest
        side network; then also fewer channels. Each yields one configuration, since a configuration that is not
        measured leaves nothing in memory.
        """
        found: dict[str, Any] = {}
        if options.weight_storage == "auto":
            found["weight_storage"] = "int8"
        if options.sample_wise == "auto" and options.scheme != "bias+head":
            found["sample_wise"] = "on"
        if options.scheme not in (None, "rep-net"):
            yield from [found] if found else []
            return
        for width in (WIDTHS[0], WIDTHS[-1]) if options.side_width is None else (options.side_width,):
            yield {**found, "side_width": width, **({"prune": "off"} if options.prune == "auto" else {})}
        if options.prune == "auto":
            yield {**found, "side_width": options.side_width or WIDTHS[-1], "prune": "on"}

    @property
    def candidates(self) -> tuple[Configuration, ...]:
        """The configurations that the options allow, by expected loss of accuracy.

        Among equals the faster comes first: blocks that run image by image take more time. Blocks whose biases train
        cannot run image by image. Pruning requires a side network, whose gradients determine the target size of blocks.
        """
        widths: tuple[float, ...] = (0.0,)
        pruned = _values("off")
        if self.scheme == "rep-net":
            widths = WIDTHS if self.side_width is None else (self.side_width,)
            pruned = _values(self.prune if self.prune in ("auto", "off") else "on")
        by_sample = _values(self.sample_wise if self.scheme != "bias+head" else "off")
        int8 = {"auto": (False, True), "float32": (False,), "int8": (True,)}[self.weight_storage]
        found = [Configuration(*each) for each in product(widths, pruned, int8, by_sample)]
        return tuple(sorted(found, key=lambda each: each.loss))

    @property
    def configuration(self) -> Configuration:
        """The configuration that ``propose`` filled in."""
        return self.candidates[0]


def _values(choice: str) -> tuple[bool, ...]:
    return {"auto": (False, True), "on": (True,), "off": (False,)}[choice]


@dataclass(frozen=True)
class FittedConfiguration:
    """A configuration at a batch that fits, its expected loss in percentage points, and the seconds of a step."""

    configuration: Configuration
    micro: MicroBatching
    loss: float
    seconds: float


Variant = tuple[Configuration, bool]
"""A configuration, and whether its gradients are held over micro-batches."""


class LowerBounds:
    """Lower bounds on the process memory of each variant, at the smallest and at the full batch, on the meta device.

    They decide which variants are worth measuring. A measurement that runs out of memory leaves some memory behind, and
    computing a bound takes most of a second. So each bound is computed once, variants with the same step of one image
    share it, and a variant that cannot fit is never measured.

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
        if not self._smallest_batch_fits(variant, headroom):
            return variant == self.smallest and self.smallest_batch_bytes(variant) > headroom
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
