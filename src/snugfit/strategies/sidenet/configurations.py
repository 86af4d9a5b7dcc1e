"""The configurations with which ``sidenet`` can fit a budget, and the accuracy that each is expected to lose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from snugfit._core.options import Choice
from snugfit._core.profile import ProbeLine
from snugfit._core.request import StrategyOptions
from snugfit._core.workload import Workload
from snugfit.strategies.micro_batch import MicroBatching, choose_batch
from snugfit.strategies.sidenet.config import SidenetScheme as Scheme
from snugfit.strategies.sidenet.config import WeightStorage

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


def configurations(
    scheme: Scheme, side_width: float | None, prune: str, sample_wise: Choice, storage: WeightStorage
) -> Iterator[Configuration]:
    """The configurations that the options allow, by expected loss.

    Among equals the faster comes first: blocks that run image by image take more time. Blocks whose biases train cannot
    run image by image. Pruning requires a side network, whose gradients determine the target size of blocks.
    """
    widths = (0.0,) if scheme != "rep-net" else WIDTHS if side_width is None else (side_width,)
    pruned = _values("on" if prune not in ("auto", "off") else prune) if scheme == "rep-net" else (False,)
    by_sample = _values(sample_wise) if scheme != "bias+head" else (False,)
    int8 = {"auto": (False, True), "float32": (False,), "int8": (True,)}[storage]
    found = [Configuration(*each) for each in product(widths, pruned, int8, by_sample)]
    yield from sorted(found, key=lambda each: each.loss)


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
    values: dict[str, tuple[bool, ...]] = {"auto": (False, True), "on": (True,), "off": (False,)}
    return values[choice]


@dataclass(frozen=True)
class FittedConfiguration:
    """A configuration at a batch that fits.

    Attributes:
        configuration: how the network is stored and run.
        micro: the micro-batches of a step.
        loss: expected loss of accuracy in percentage points.
        seconds: of a step.
    """

    configuration: Configuration
    micro: MicroBatching
    loss: float
    seconds: float


def fit_configuration(
    configuration: Configuration,
    lines: Mapping[str, ProbeLine],
    workload: Workload,
    headroom: float,
    *,
    accumulate: bool,
) -> FittedConfiguration | None:
    """A configuration at the batch from :func:`snugfit.strategies.micro_batch.choose_batch`.

    Args:
        configuration: how the network is stored and run.
        lines: measured lines by name.
        workload: what is trained.
        headroom: bytes for a step.
        accumulate: whether micro-batches may be accumulated to the batch.

    Returns:
        None if not one image fits.
    """
    batch = workload.effective_batch
    micro = choose_batch(lines, configuration.probe, headroom, batch, accumulate=accumulate)
    if micro is None:
        return None
    loss = configuration.loss_at(micro.micro_batch, batch)
    seconds = micro.seconds(lines[micro.line(configuration.probe)]) * (batch / micro.micro_batch)
    return FittedConfiguration(configuration, micro, loss, seconds)
