"""Gradient-isolated modules: which consecutive units train together by backpropagation. Arithmetic, no torch.

Gradients are exact inside a module and do not cross to the one before it, as in InfoPro (Wang et al., ICLR 2021,
section 3.1). Fewer modules come closer to backpropagation and need more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from snugfit._core.profile import ProbeLine
from snugfit.strategies.memory_estimates import available_headroom
from snugfit.strategies.recomputation.dynamic_program import UnitCost, frontier, schedule_cost
from snugfit.strategies.recomputation.schedule import Schedule

Module = tuple[int, int, str]
"""First unit, last unit and schedule of a module; the schedule is empty if nothing is recomputed."""

WORTHWHILE = 0.9
"""A schedule with recomputation is considered if it needs at most this share of the memory of the one before it."""

ENDING_SHARE = 0.95
"""Share of the headroom that a measured module may need to end the search: later measurements leave kernels behind."""


@dataclass(frozen=True)
class ModuleCosts:
    """What units and their local losses need in a step at one batch size.

    Attributes:
        units: of each unit.
        losses: of the local loss that a module has if it ends after this unit; the network's head after the last.
        kept_bytes: weights, buffers and optimizer state of each unit.
        loss_kept_bytes: the same of each loss.
        input_bytes: of each unit's input.
    """

    units: Sequence[UnitCost]
    losses: Sequence[UnitCost]
    kept_bytes: Sequence[int]
    loss_kept_bytes: Sequence[int]
    input_bytes: Sequence[int]

    def __len__(self) -> int:
        return len(self.units)

    def of_module(self, first: int, last: int) -> list[UnitCost]:
        """Costs of the units ``first`` to ``last`` and of the loss behind them."""
        return [*self.units[first : last + 1], self.losses[last]]

    def fixed_bytes(self, first: int, last: int) -> int:
        """Bytes of a module's weights and input, which are in memory during the whole step."""
        return sum(self.kept_bytes[first : last + 1]) + self.loss_kept_bytes[last] + self.input_bytes[first]

    def step_bytes(self, first: int, last: int, schedule: Schedule | None = None) -> int:
        """Tensor bytes of a module's step, by a schedule of its units and loss; nothing is recomputed by default."""
        costs = self.of_module(first, last)
        return self.fixed_bytes(first, last) + schedule_cost(schedule or Schedule.keeping(len(costs)), costs)[1]


@dataclass(frozen=True)
class Partition:
    """A division of a network into modules.

    Attributes:
        sizes: number of units in each module.
        schedules: which units of each module run again, as a ``Schedule`` prints; empty if none does.
        step_bytes: tensor bytes of the step of each module, without the other modules.
    """

    sizes: tuple[int, ...]
    schedules: tuple[str, ...]
    step_bytes: tuple[int, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first and the last unit of each module."""
        ends = [0, *accumulate(self.sizes)]
        return [(start, end - 1) for start, end in pairwise(ends)]

    @property
    def modules(self) -> list[Module]:
        """First and last unit, and schedule, of each module."""
        return [(*span, schedule) for span, schedule in zip(self.spans, self.schedules, strict=True)]


def balanced_sizes(costs: ModuleCosts, modules: int) -> tuple[int, ...]:
    """Sizes of a number of modules whose largest step takes the least memory, without recomputation.

    A dynamic program over cuts: B[k, t] = min over s of max(B[k - 1, s - 1], bytes of the module s to t).
    """

    @cache
    def step_bytes(first: int, last: int) -> int:
        return costs.step_bytes(first, last)

    @cache
    def best(count: int, last: int) -> tuple[int, tuple[int, ...]]:
        if count == 1:
            return step_bytes(0, last), (last + 1,)
        options = []
        for first in range(count - 1, last + 1):
            peak, sizes = best(count - 1, first - 1)
            options.append((max(peak, step_bytes(first, last)), (*sizes, last - first + 1)))
        return min(options)

    return best(modules, len(costs) - 1)[1]


def partitions_of(costs: ModuleCosts, modules: int) -> list[Partition]:
    """The partition into a number of modules, with recomputation by several schedules, fastest first.

    The first recomputes nothing. The last needs the least memory: no module needs more than the hungriest one does by
    its leanest schedule, and recomputes no more than this limit requires. Between both lies their geometric mean.
    """
    sizes = balanced_sizes(costs, modules)
    spans = Partition(sizes, (), ()).spans
    plain = [costs.step_bytes(*span) for span in spans]
    fronts = [_frontier(costs, *span) for span in spans]
    least = max(front[0][0] for front in fronts)
    found = [Partition(sizes, ("",) * modules, tuple(plain))]
    for limit in ((least * max(plain)) ** 0.5, float(least)):
        chosen = [next(pair for pair in reversed(front) if pair[0] <= limit) for front in fronts]
        step_bytes = tuple(size for size, _ in chosen)
        if max(step_bytes) <= WORTHWHILE * max(found[-1].step_bytes):
            found.append(Partition(sizes, tuple(text for _, text in chosen), step_bytes))
    return found


def _frontier(costs: ModuleCosts, first: int, last: int) -> list[tuple[int, str]]:
    """Bytes and text of the Pareto-optimal schedules of a module's units, leanest first."""
    found = []
    for schedule in frontier(costs.of_module(first, last)):
        units = Schedule(schedule.parts[:-1])  # the loss is the last part and never runs again
        found.append((costs.step_bytes(first, last, schedule), str(units) if units.recomputes else ""))
    return found


def module_counts(units: int) -> list[int]:
    """Numbers of modules to consider, fewest first: 1, 2, 3, 4, 6, 8, 12, ... and one module per unit."""
    counts = sorted({each * 2**power for each in (2, 3) for power in range(units)} | {1})
    return [*(count for count in counts if count < units), units]


def all_partitions(costs: ModuleCosts) -> list[Partition]:
    """The partitions to consider, fewest modules first; with as many modules as units, nothing is recomputed."""
    counts = module_counts(len(costs))
    found = [each for count in counts[:-1] for each in partitions_of(costs, count)]
    return [*found, partitions_of(costs, counts[-1])[0]]


def even_modules(units: int, size: int) -> tuple[Module, ...]:
    """Modules of ``size`` units each, the last one of the rest."""
    return tuple((first, min(first + size, units) - 1, "") for first in range(0, units, size))


def fastest_divisions(units: int, seconds: Mapping[Module, float]) -> list[tuple[Module, ...]]:
    """The fastest division of the units into 1, 2, 3, ... of the given modules, for every number that has one.

    A dynamic program over cuts: T[k, t] = min over modules from s to t of T[k - 1, s - 1] + seconds of the module.

    Args:
        units: number of units.
        seconds: time that each module takes for a sample.
    """
    best: dict[int, dict[int, tuple[float, tuple[Module, ...]]]] = {0: {-1: (0.0, ())}}
    for count in range(1, units + 1):
        best[count] = {}
        for span, time in sorted(seconds.items()):
            before = best[count - 1].get(span[0] - 1)
            if before is None:
                continue
            option = (before[0] + time, (*before[1], span))
            best[count][span[1]] = min(best[count].get(span[1], option), option)
    return [best[count][units - 1][1] for count in range(1, units + 1) if units - 1 in best[count]]


@dataclass(frozen=True)
class PartitionFilter:
    """Decides which modules are worth measuring: those of the partition with the fewest modules that may fit.

    Attributes:
        partitions: fewest modules first.
        names: names of the probes of each partition's modules.
        batch: the batch that every module should reach.
    """

    partitions: Sequence[Partition]
    names: Sequence[Sequence[str]]
    batch: int

    def is_worth_measuring(self, name: str, tried: Mapping[str, ProbeLine | None], available: float) -> bool:
        """Whether a module may be part of the division; see :class:`snugfit.profiling.Probe`."""
        if name in tried:
            return False
        headroom = available_headroom(available)
        for partition, names in zip(self.partitions, self.names, strict=True):
            is_last = partition is self.partitions[-1]
            lines = [tried[each] for each in names if each in tried]
            if not is_last and (max(partition.step_bytes) > headroom or not all(map(self._reaches(headroom), lines))):
                continue
            if len(lines) < len(names) or is_last:
                return name in names
            return False
        return False

    def _reaches(self, headroom: float) -> Callable[[ProbeLine | None], bool]:
        return lambda line: line is not None and line.bytes_at(self.batch) <= ENDING_SHARE * headroom
