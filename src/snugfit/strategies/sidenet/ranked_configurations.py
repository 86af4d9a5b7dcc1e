"""From measured lines to what fits a budget, and which of it is expected to lose the least accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from snugfit._core.profile import ProbeLine
from snugfit._core.workload import Workload
from snugfit.strategies.full_network import divisors, held
from snugfit.strategies.sidenet.configurations import Configuration


@dataclass(frozen=True)
class Option:
    """A configuration at a batch that fits.

    Attributes:
        configuration: how the network is kept and run.
        micro_batch: images in memory at once.
        micro_batches: micro-batches that make a step.
        loss: points of accuracy that it is expected to lose.
        seconds: of a step.
    """

    configuration: Configuration
    micro_batch: int
    micro_batches: int
    loss: float
    seconds: float

    @property
    def line(self) -> str:
        """Key of the line that it was measured by."""
        name = self.configuration.probe
        return held(name) if self.micro_batches > 1 else name


def options_of(
    configuration: Configuration,
    lines: Mapping[str, ProbeLine],
    workload: Workload,
    headroom: float,
    *,
    accumulate: bool,
) -> Iterator[Option]:
    """The whole batch, the largest micro-batch that divides it, and without accumulation the largest batch that fits.

    Args:
        configuration: how the network is kept and run.
        lines: as measured so far.
        workload: what is trained.
        headroom: bytes that a step may take.
        accumulate: whether micro-batches may be accumulated to the batch.
    """
    batch, name = min(workload.batch_size, workload.train_count), configuration.probe

    def option(micro_batch: int, micro_batches: int) -> Option:
        loss = configuration.loss_at(micro_batch, batch)
        line = lines[held(name) if micro_batches > 1 else name]
        steps = batch / micro_batch
        seconds = line.seconds_at(micro_batch) * steps / (2 if micro_batches > 1 else 1)
        return Option(configuration, micro_batch, micro_batches, loss, seconds)

    whole = _largest(lines.get(name), headroom, batch)
    if whole and (whole == batch or not accumulate):
        yield option(whole, 1)
    elif accumulate:
        most, line = _largest(lines.get(held(name)), headroom, batch), lines.get(held(name))
        sizes = [size for size in divisors(batch)[:-1] if line and line.smallest_batch <= size <= most]
        if sizes:
            yield option(sizes[-1], batch // sizes[-1])
        elif whole:
            yield option(whole, 1)


def _largest(line: ProbeLine | None, headroom: float, limit: int) -> int:
    if line is None:
        return 0
    return limit if headroom == float("inf") else line.largest_batch(headroom, limit)


def best(options: Iterable[Option]) -> Option | None:
    """What is expected to lose the least accuracy; the fastest of those that lose the same."""
    return min(options, key=lambda option: (round(option.loss, 6), option.seconds), default=None)
