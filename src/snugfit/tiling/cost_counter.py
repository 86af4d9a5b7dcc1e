"""The cost of a training step counted from regions, without torch, in the stages of :mod:`snugfit.tiling.distributed`.

Multiply-accumulates count the region that a layer produces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from snugfit._core.options import Rest, WeightUpdate
from snugfit.tiling.geometry import Interval, balanced
from snugfit.tiling.layers import EMPTY_REGION, Region
from snugfit.tiling.schedule import BackwardGroup, Regions, Schedule
from snugfit.tiling.step_cost import DIRECT, FLOAT, GATEWAY, Kind, Messages, Pass, Stage, StepCost

if TYPE_CHECKING:
    from snugfit.tiling.exchange import Cell


@dataclass(frozen=True)
class Placement:
    """Where weights are updated, and who computes the layers behind the tiled ones."""

    update: WeightUpdate = "all-reduce"
    rest: Rest = "gateway"


def count_step_cost(
    schedule: Schedule,
    cells: Sequence[Cell],
    images: int,
    placement: Placement | None = None,
    *,
    processes: int | None = None,
    weights: int | None = None,
    rest_macs: int = 0,
) -> StepCost:
    """Count the cost of a training step, except commands and labels, which are some bytes per image.

    Args:
        schedule: what every tile holds, fetches and computes; with a backward pass.
        cells: tiles of all processes.
        images: in the batch.
        placement: which processes do the rest; the default where None.
        processes: number of processes, including those without a tile; by default as many as have one.
        weights: trained parameters, including norms'; by default those of the trained layers.
        rest_macs: multiply-accumulates of these layers in an image's forward pass.
    """
    count = processes or 1 + max(cell.rank for cell in cells)
    placement = placement or Placement()
    counter = _Counter(schedule, tuple(cells), images, count, placement.rest)
    stages = [*counter.forward(), *counter.apply_rest(rest_macs), *counter.backward()]
    stages += _of_weights(counter.weights() if weights is None else weights, count, placement.update)
    tiles = Counter(cell.rank for cell in cells)
    return StepCost(tuple(stages), counter.kept(), tuple(tiles[rank] for rank in range(count)))


class _Counter:
    def __init__(self, schedule: Schedule, cells: Sequence[Cell], images: int, processes: int, rest: Rest) -> None:
        self.schedule, self.processes, self.rest, self.images = schedule, processes, rest, images
        self.network, self.tiling = schedule.network, schedule.tiling
        self.maps, self.layers = schedule.tiling.layers.maps, schedule.tiling.layers.layers
        shares = balanced(images, 1 + max(cell.replica for cell in cells))
        self.cells = [(cell, len(shares[cell.replica])) for cell in cells]
        self.owners = {(cell.replica, cell.tile): cell.rank for cell in cells}

    def weights(self) -> int:
        """Parameters of trained layers."""
        trains = self.network.trains if self.network else ()
        return sum(each.weights for each, trained in zip(self.layers, trains, strict=False) if trained)

    def forward(self) -> list[Stage]:
        """From the images to the last feature map, at the gateway or everywhere."""
        stages: list[Stage] = []
        for index, (start, stop) in enumerate(self.schedule.forward.groups):
            held = {tile: groups[index] for tile, groups in self.schedule.forward_groups.items()}
            wanted = {tile: regions[start] for tile, regions in held.items()}
            messages = self._halos(start, wanted) if index else self._scattered(start, wanted)
            macs = self._per_process({tile: self._run(start, stop, regions) for tile, regions in held.items()})
            stages.append(Stage("forward halo" if index else "images", "forward", messages, macs))
            stages += self._norms(start, stop, "forward", halo=bool(index and any(messages.values())))
        targets = range(self.processes) if self.rest == "replicated" else (GATEWAY,)
        return [*stages, self._idle("last map", "forward", self._gathered(self.schedule.forward.cuts[-1], targets))]

    def apply_rest(self, macs: int) -> list[Stage]:
        """The layers behind the tiled ones; gradients of feature maps and of weights each take as much as forward."""
        busy = self.processes if self.rest == "replicated" else GATEWAY + 1
        work = [self.images * macs if rank < busy else 0 for rank in range(self.processes)]
        forward = Stage("rest", "forward", {}, tuple(work))
        backward = Stage("rest", "backward", {}, tuple(2 * each for each in work))
        return [forward, backward] if macs else []

    def backward(self) -> list[Stage]:
        """From the gradient of the last feature map to gradients of weights on every process."""
        stages: list[Stage] = []
        if self.network is None:
            return stages
        for index, found in enumerate(zip(*self.schedule.backward_groups.values(), strict=True)):
            groups = dict(zip(self.schedule.backward_groups, found, strict=True))
            start, stop = found[0].start, found[0].stop
            wanted = {tile: group.gradients[stop] for tile, group in groups.items()}
            if index:
                messages = self._halos(stop, wanted)
            else:  # nothing travels if everyone has all of the gradient
                messages = {} if self.rest == "replicated" else self._scattered(stop, wanted)
            if any(group.entries for group in found):
                stages.append(self._recomputation(start, stop, groups))
            macs = self._per_process({tile: self._back(tile, group) for tile, group in groups.items()})
            stages.append(Stage("backward halo" if index else "gradient", "backward", messages, macs))
            stages += self._norms(start, stop, "backward", halo=bool(index and any(messages.values())))
        if self.network.flows[0]:
            stages.append(self._idle("last map", "backward", self._gathered(0, (GATEWAY,))))
        return stages

    def kept(self) -> tuple[int, ...]:
        """Bytes per process; a kept feature map is as wide as the forward pass made it."""
        last = self.schedule.forward.cuts[-1]

        def values(tile: tuple[int, int]) -> int:
            groups = zip(self.schedule.forward.groups, self.schedule.forward_groups[tile], strict=True)
            held = {
                number: region
                for (start, stop), regions in groups
                for number, region in regions.items()
                if start <= number < stop or number == last
            }
            kept = self.schedule.kept[tile]
            return sum(self.maps[each].channels * region.area for each, region in held.items() if each in kept)

        return tuple(FLOAT * count for count in self._per_process({tile: values(tile) for tile in self.tiling.tiles}))

    # Work of a tile, for one image

    def _run(self, start: int, stop: int, regions: Regions) -> int:
        made = (number for number in range(start, stop) if number + 1 in regions)
        return sum(regions[number + 1].area * self.layers[number].macs for number in made)

    def _back(self, tile: tuple[int, int], group: BackwardGroup) -> int:
        """Gradients of feature maps where they are needed, and of weights on the tile's own pixels."""
        assert self.network is not None
        macs = 0
        for number in range(group.start, group.stop):
            layer = self.layers[number]
            if not self.network.flows[number + 1] or not layer.macs:
                continue
            pixels = sum(group.gradients[read].area for read in layer.reads if self.network.flows[read])
            macs += pixels * layer.macs // layer.strides
            if self.network.reads[number] == "core":
                macs += self.tiling.core(number + 1, tile).area * layer.macs
        return macs

    def _recomputation(self, start: int, stop: int, groups: Mapping[tuple[int, int], BackwardGroup]) -> Stage:
        """The recomputation of a group's feature maps from the first one with its halo."""
        wanted = {tile: group.entries[start] for tile, group in groups.items() if start in group.entries}
        made = {tile: self.tiling.layers.needed(start, stop, group.saved) for tile, group in groups.items()}
        macs = self._per_process({tile: self._run(start, stop, regions) for tile, regions in made.items()})
        return Stage("recompute halo", "recompute", self._halos(start, wanted), macs)

    def _norms(self, start: int, stop: int, part: Pass, *, halo: bool) -> list[Stage]:
        """Sums over the whole feature map, from every process to all: two per channel forward, two backward.

        The sums of a norm at which a group begins travel together with its halo and wait one message less.
        """
        numbers = [each for each in range(start, stop) if self.layers[each].sums]
        if part == "backward":
            numbers = [each for each in reversed(numbers) if self.network is None or self.network.flows[each + 1]]
        with_halo = (start if part == "forward" else stop - 1) if halo else None
        gathered, rounds = (all_to_all, 1) if self.processes <= DIRECT else (all_gathered, self.processes - 1)
        stages = []
        for each in numbers:
            stage = self._idle("norms", part, gathered(2 * self.layers[each].sums, self.processes))
            stages.append(replace(stage, rounds=max(rounds - (each == with_halo), 0)))
        return stages

    # Messages

    def _scattered(self, number: int, wanted: Mapping[tuple[int, int], Region]) -> Messages:
        """Parts of a feature map from the gateway."""
        return self._sent(number, ((GATEWAY, cell.rank, each * wanted[cell.tile].area) for cell, each in self.cells))

    def _gathered(self, number: int, targets: Iterable[int]) -> Messages:
        """Cores of a feature map to the processes that need all of it."""
        cores = [(cell.rank, each * self.tiling.core(number, cell.tile).area) for cell, each in self.cells]
        return self._sent(number, ((rank, target, pixels) for rank, pixels in cores for target in targets))

    def _halos(self, number: int, wanted: Mapping[tuple[int, int], Region]) -> Messages:
        """Parts of a feature map from the processes that own them."""

        def parts() -> Iterable[tuple[int, int, int]]:
            for cell, images in self.cells:
                region = wanted.get(cell.tile, EMPTY_REGION)
                widths = _overlaps(self.tiling.columns[number], region.columns)
                for row, height in _overlaps(self.tiling.rows[number], region.rows).items():
                    for column, width in widths.items():
                        yield self.owners[cell.replica, (row, column)], cell.rank, images * height * width

        return self._sent(number, parts())

    def _sent(self, number: int, parts: Iterable[tuple[int, int, int]]) -> Messages:
        """Floats of a feature map's parts, each with source, target and pixels, that cross to another process."""
        found: Counter[tuple[int, int]] = Counter()
        for source, target, pixels in parts:
            if source != target:
                found[source, target] += self.maps[number].channels * pixels
        return found

    def _idle(self, kind: Kind, part: Pass, messages: Messages) -> Stage:
        return Stage(kind, part, messages, (0,) * self.processes)

    def _per_process(self, per_tile: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
        """Sum a count per image and tile over the images and tiles of each process."""
        found = [0] * self.processes
        for cell, images in self.cells:
            found[cell.rank] += images * per_tile[cell.tile]
        return tuple(found)


def _overlaps(parts: Sequence[Interval], wanted: Interval) -> dict[int, int]:
    """Number of wanted rows in each part, for parts that have any."""
    found = {index: len(part & wanted) for index, part in enumerate(parts)}
    return {index: count for index, count in found.items() if count}


def _of_weights(weights: int, processes: int, update: WeightUpdate) -> list[Stage]:
    """Gradients summed by all, or by the gateway, which then sends out weights (Algorithm 1)."""
    still, others = (0,) * processes, range(1, processes)
    if processes == 1 or not weights:
        return []
    if update == "all-reduce":
        return [Stage("weights", "backward", all_reduced(weights, processes), still, rounds=2 * (processes - 1))]
    there = Stage("weights", "backward", {(rank, GATEWAY): weights for rank in others}, still)
    return [there, replace(there, messages={(GATEWAY, rank): weights for rank in others})]


def all_reduced(floats: int, processes: int) -> Messages:
    """Messages of an all-reduce by a ring: every process passes on every other part, to add up and to distribute."""
    return _ring(-(-2 * (processes - 1) * floats // processes), processes)


def all_gathered(floats: int, processes: int) -> Messages:
    """Messages of an all-gather by a ring."""
    return _ring((processes - 1) * floats, processes)


def all_to_all(floats: int, processes: int) -> Messages:
    """Messages of an all-gather by direct messages between all processes."""
    pairs = ((source, target) for source in range(processes) for target in range(processes) if source != target)
    return dict.fromkeys(pairs, floats) if floats else {}


def _ring(floats: int, processes: int) -> Messages:
    return {(rank, (rank + 1) % processes): floats for rank in range(processes)} if processes > 1 and floats else {}
