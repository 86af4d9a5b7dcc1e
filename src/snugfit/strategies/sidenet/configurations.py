"""Settings of ``sidenet``: the configurations they allow, and the accuracy that each is expected to lose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from snugfit._core.request import StrategyOptions
from snugfit.errors import UsageError
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
    """How the network is stored and run.

    Attributes:
        side_width: width of the side network; 0 if the scheme has none.
        pruned: whether channels of the frozen blocks are removed.
        int8: whether frozen weights are stored as int8.
        by_sample: whether memory-bound frozen blocks run image by image.
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


def low_memory_settings(options: StrategyOptions) -> Iterator[dict[str, Any]]:
    """The settings with the least memory for the options that the user left open, by expected loss.

    First frozen weights in int8 and large feature maps image by image; then also the narrowest side network; then also
    fewer channels. Each yields one configuration, since a configuration that is not measured leaves nothing in memory.
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


def _values(choice: str) -> tuple[bool, ...]:
    return {"auto": (False, True), "on": (True,), "off": (False,)}[choice]


@dataclass(frozen=True)
class FittedConfiguration:
    """A configuration at a batch that fits, its expected loss in percentage points, and the seconds of a step."""

    configuration: Configuration
    micro: MicroBatching
    loss: float
    seconds: float
