"""The ways in which ``sidenet`` can fit a budget, and how much accuracy each is expected to lose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from snugfit._core.options import Choice
from snugfit._core.request import StrategyOptions
from snugfit.strategies.sidenet.config import SidenetScheme as Scheme
from snugfit.strategies.sidenet.config import WeightStorage

PREFIX = "sidenet"
WIDTHS = (1.0, 0.5, 0.25)
"""Widths of the side network that are tried where none is asked for."""

FEW_IMAGES, INT8, PRUNED, NARROW = 0.12, 0.2, 0.6, 1.0
"""Percentage points of accuracy that are expected to be lost: by a side network whose BatchNorm sees half as many
images as :data:`ENOUGH` (four times that at a quarter), by weights rounded to int8 per channel, by pruning and
retraining (the paper's 65.2 -> 64.6 %, section V), and by half the width. They are there to order ways that all fit,
not to foretell accuracy."""
ENOUGH = 8
"""Images that BatchNorm of the side network needs: the batch that Rep-Net and the paper train at."""


@dataclass(frozen=True)
class Configuration:
    """How the network is kept and run.

    Attributes:
        side_width: width of the side network; 0 where the scheme has none.
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
        """Points of accuracy that it is expected to lose; running image by image is exact."""
        narrow = NARROW * math.log2(WIDTHS[0] / self.side_width) if self.side_width else 0.0
        return PRUNED * self.pruned + INT8 * self.int8 + max(narrow, 0.0)

    def loss_at(self, micro_batch: int, batch: int) -> float:
        """The same where so many images of a batch are in memory at once: BatchNorm of the side network sees them."""
        if not self.side_width:
            return self.loss
        halvings = math.log2(max(min(ENOUGH, batch) / micro_batch, 1.0))
        return self.loss + FEW_IMAGES * halvings**2


def configurations(
    scheme: Scheme, side_width: float | None, prune: str, sample_wise: Choice, storage: WeightStorage
) -> Iterator[Configuration]:
    """The configurations that the options allow; those that are expected to lose less come first.

    Among equals the one that is faster comes first: blocks that run image by image take more time. They cannot where
    their biases train; and pruning needs a side network, whose gradients say to what size blocks are to be brought.
    """
    widths = (0.0,) if scheme != "rep-net" else WIDTHS if side_width is None else (side_width,)
    pruned = _tried("on" if prune not in ("auto", "off") else prune) if scheme == "rep-net" else (False,)
    by_sample = _tried(sample_wise) if scheme != "bias+head" else (False,)
    int8 = {"auto": (False, True), "float32": (False,), "int8": (True,)}[storage]
    found = [Configuration(*each) for each in product(widths, pruned, int8, by_sample)]
    yield from sorted(found, key=lambda each: each.loss)


def leanest(options: StrategyOptions) -> Iterator[dict[str, Any]]:
    """The leanest settings of what the user left open, those that are expected to lose less first.

    Frozen weights in int8 and large maps image by image; then the narrowest side network as well; then fewer channels.
    Each is one configuration: what is not measured leaves nothing in memory.
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


def _tried(choice: str) -> tuple[bool, ...]:
    options: dict[str, tuple[bool, ...]] = {"auto": (False, True), "on": (True,), "off": (False,)}
    return options[choice]
