"""From measured lines to what fits a budget, and which of it is expected to lose the least accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from snugfit._core.profile import ProbeLine
from snugfit._core.workload import Workload
from snugfit.strategies.micro_batch import MicroBatching, choose_batch
from snugfit.strategies.sidenet.configurations import Configuration


@dataclass(frozen=True)
class Option:
    """A configuration at a batch that fits.

    Attributes:
        configuration: how the network is kept and run.
        micro: the micro-batches of a step.
        loss: points of accuracy that it is expected to lose.
        seconds: of a step.
    """

    configuration: Configuration
    micro: MicroBatching
    loss: float
    seconds: float


def option_of(
    configuration: Configuration,
    lines: Mapping[str, ProbeLine],
    workload: Workload,
    headroom: float,
    *,
    accumulate: bool,
) -> Option | None:
    """A configuration at the batch that :func:`snugfit.strategies.micro_batch.choose_batch` takes.

    Args:
        configuration: how the network is kept and run.
        lines: as measured so far.
        workload: what is trained.
        headroom: bytes that a step may take.
        accumulate: whether micro-batches may be accumulated to the batch.

    Returns:
        None where not one image fits.
    """
    batch = workload.effective_batch
    micro = choose_batch(lines, configuration.probe, headroom, batch, accumulate=accumulate)
    if micro is None:
        return None
    loss = configuration.loss_at(micro.micro_batch, batch)
    seconds = micro.seconds(lines[micro.line(configuration.probe)]) * (batch / micro.micro_batch)
    return Option(configuration, micro, loss, seconds)


def best(options: Iterable[Option]) -> Option | None:
    """What is expected to lose the least accuracy; the fastest of those that lose the same."""
    return min(options, key=lambda option: (round(option.loss, 6), option.seconds), default=None)
