"""The cost of a training step counted from regions, without torch, in the stages of :mod:`snugfit.tiling.distributed`.

Multiply-accumulates count the region that a layer produces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from snugfit._core.options import Rest, WeightUpdate
from snugfit.tiling.geometry import Interval, balanced
from snugfit.tiling.layers import Region
from snugfit.tiling.schedule import BackwardGroup, Regions, Schedule
from snugfit.tiling.step_cost import (
    DIRECT,
    FLOAT,
    GATEWAY,
    Kind,
    Messages,
    Pass,
    Stage,
    StepCost,
    all_gathered,
    all_reduced,
    all_to_all,
)

if TYPE_CHECKING:
    from snugfit.tiling.routes import Cell


@dataclass(frozen=True)
class Placement:
    """Which processes do what is not done in tiles.

    Attributes:
        update: where weights are updated.
        rest: who computes the layers behind the tiled ones.
    """

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
        weights: trained parameters, including norms'; by default those of :class:`Layer`.
        rest_macs: multiply-accumulates of these layers in an image's forward pass.
    """
    count = processes or 1 + max(cell.rank for cell in cells)
    placement = placement or Placement()
    counter = _Counter(schedule, tuple(cells), images, count, placement.rest)
    stages = [*counter.forward(), *counter.apply_rest(rest_macs), *counter.backward()]
    stages += _of_weights(counter.weights if weights is None else weights, count, placement.update)
    tiles = Counter(cell.rank for cell in cells)
    return StepCost(tuple(stages), counter.kept(), tuple(tiles[rank] for rank in range(count)))


@dataclass(frozen=True)
class _Counter:
    schedule: Schedule
    cells: tuple[Cell, ...]
    images: int
    processes: int
    rest: Rest
    _owners: dict[tuple[int, tuple[int, int]], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._owners.update({(cell.replica, cell.tile): cell.rank for cell in self.cells})

    @property
    def weights(self) -> int:
        """Parameters of trained layers."""
        network = self.schedule.network
        layers = self.schedule.tiling.layers.layers
        return (
            sum(each.weights for each, trains in zip(layers, network.trains, strict=True) if trains) if network else 0
        )

    def forward(self) -> list[Stage]:
        """From the images to the last feature map, at the gateway or everywhere."""
        stages: list[Stage] = []
        for index, (start, stop) in enumerate(self.schedule.forward.groups):
            held = {tile: groups[index] for tile, groups in self.schedule.forward_groups.items()}
            wanted = {tile: regions[start] for tile, regions in held.items()}
            messages = self._scattered(start, wanted) if index == 0 else self._halos(start, wanted)
            macs = self._per_process({tile: self._run(start, stop, regions) for tile, regions in held.items()})
            stages.append(Stage("images" if index == 0 else "forward halo", "forward", messages, macs))
            stages += self._norms(start, stop, "forward", halo=bool(index and any(messages.values())))
        targets = range(self.processes) if self.rest == "replicated" else (GATEWAY,)
        return [*stages, self._idle("last map", "forward", self._gathered(self.schedule.forward.cuts[-1], targets))]

    def apply_rest(self, macs: int) -> list[Stage]:
        """The layers behind the tiled ones.

        Gradients of feature maps and of weights take as much as the forward pass each.
        """
        busy = self.processes if self.rest == "replicated" else GATEWAY + 1
        work = [self.images * macs if rank < busy else 0 for rank in range(self.processes)]
        forward = Stage("rest", "forward", {}, tuple(work))
        backward = Stage("rest", "backward", {}, tuple(2 * each for each in work))
        return [forward, backward] if macs else []

    def backward(self) -> list[Stage]:
        """From the gradient of the last feature map to gradients of weights on every process."""
        network, stages = self.schedule.network, list[Stage]()
        if network is None:
            return []
        spans = [(each.start, each.stop) for each in next(iter(self.schedule.backward_groups.values()))]
        for index, (start, stop) in enumerate(spans):
            groups = {tile: found[index] for tile, found in self.schedule.backward_groups.items()}
            wanted = {tile: group.gradients[stop] for tile, group in groups.items()}
            messages = self._gradients_from_gateway(stop, wanted) if index == 0 else self._halos(stop, wanted)
            stage = self._idle("gradient" if index == 0 else "backward halo", "backward", messages)
            recomputed = (
                [self._recomputation(start, stop, groups)] if any(group.entries for group in groups.values()) else []
            )
            macs = self._per_process({tile: self._back(tile, group) for tile, group in groups.items()})
            stages += [
                *recomputed,
                replace(stage, macs=macs),
                *self._norms(start, stop, "backward", halo=bool(index and any(messages.values()))),
            ]
        if network.flows[0]:
            stages.append(self._idle("last map", "backward", self._gathered(0, (GATEWAY,))))
        return stages

    def kept(self) -> tuple[int, ...]:
        """Bytes per process; a kept feature map is as wide as the forward pass made it."""
        layers, last = self.schedule.tiling.layers, self.schedule.forward.cuts[-1]

        def values(tile: tuple[int, int]) -> int:
            groups = zip(self.schedule.forward.groups, self.schedule.forward_groups[tile], strict=True)
            held = {
                number: region
                for (start, stop), regions in groups
                for number, region in regions.items()
                if start <= number < stop or number == last
            }
            kept = self.schedule.kept[tile]
            return sum(layers.maps[each].channels * region.area for each, region in held.items() if each in kept)

        per_tile = {tile: values(tile) for tile in self.schedule.tiling.tiles}
        return tuple(FLOAT * count for count in self._per_process(per_tile))

    # Work of a tile, for one image

    def _run(self, start: int, stop: int, regions: Regions) -> int:
        layers = self.schedule.tiling.layers.layers
        return sum(
            regions[number + 1].area * layers[number].macs for number in range(start, stop) if number + 1 in regions
        )

    def _back(self, tile: tuple[int, int], group: BackwardGroup) -> int:
        """Gradients of feature maps where they are needed, and of weights on the tile's own pixels."""
        assert self.schedule.network is not None
        network, macs = self.schedule.network, 0
        for number in range(group.start, group.stop):
            layer = self.schedule.tiling.layers.layers[number]
            if not network.flows[number + 1] or not layer.macs:
                continue
            pixels = sum(group.gradients[read].area for read in layer.reads if network.flows[read])
            macs += pixels * layer.macs // layer.strides
            macs += self._core(number + 1, tile).area * layer.macs if network.reads[number] == "core" else 0
        return macs

    def _recomputation(self, start: int, stop: int, groups: Mapping[tuple[int, int], BackwardGroup]) -> Stage:
        """The recomputation of a group's feature maps from the first one with its halo."""
        layers = self.schedule.tiling.layers
        wanted = {tile: group.entries[start] for tile, group in groups.items() if start in group.entries}
        made = {tile: layers.needed(start, stop, group.saved) for tile, group in groups.items()}
        macs = self._per_process({tile: self._run(start, stop, regions) for tile, regions in made.items()})
        return Stage("maps anew", "recompute", self._halos(start, wanted), macs)

    def _norms(self, start: int, stop: int, part: Pass, *, halo: bool) -> list[Stage]:
        """Sums over the whole feature map, from every process to all: two per channel forward, two backward.

        The sums of a norm at which a group begins travel together with its halo and wait one message less.
        """
        network, layers = self.schedule.network, self.schedule.tiling.layers.layers
        numbers = [each for each in range(start, stop) if layers[each].sums]
        if part == "backward":
            numbers = [each for each in reversed(numbers) if network is None or network.flows[each + 1]]
        with_halo = (start if part == "forward" else stop - 1) if halo else None
        gathered = all_to_all if self.processes <= DIRECT else all_gathered
        rounds = 1 if self.processes <= DIRECT else self.processes - 1
        return [
            replace(
                self._idle("norms", part, gathered(2 * layers[each].sums, self.processes)),
                rounds=max(rounds - (each == with_halo), 0),
            )
            for each in numbers
        ]

    # Messages

    def _scattered(self, number: int, wanted: Mapping[tuple[int, int], Region]) -> Messages:
        """Parts of a feature map from the gateway."""
        found: Counter[tuple[int, int]] = Counter()
        for cell, images in zip(self.cells, self._shares(), strict=True):
            if cell.rank != GATEWAY:
                found[GATEWAY, cell.rank] += self._values(number, wanted[cell.tile].area) * images
        return found

    def _gradients_from_gateway(self, number: int, wanted: Mapping[tuple[int, int], Region]) -> Messages:
        """Parts of a gradient from the gateway; nothing if everyone has all of it."""
        return {} if self.rest == "replicated" else self._scattered(number, wanted)

    def _gathered(self, number: int, targets: Iterable[int]) -> Messages:
        """Cores of a feature map to the processes that need all of it."""
        found: Counter[tuple[int, int]] = Counter()
        for cell, images in zip(self.cells, self._shares(), strict=True):
            for target in {*targets} - {cell.rank}:
                found[cell.rank, target] += self._values(number, self._core(number, cell.tile).area) * images
        return found

    def _halos(self, number: int, wanted: Mapping[tuple[int, int], Region]) -> Messages:
        """Parts of a feature map from the processes that own them."""
        tiling, found = self.schedule.tiling, Counter[tuple[int, int]]()
        for cell, images in zip(self.cells, self._shares(), strict=True):
            region = wanted.get(cell.tile)
            if region is None:
                continue
            heights = _overlaps(tiling.rows[number], region.rows)
            widths = _overlaps(tiling.columns[number], region.columns)
            for row, height in heights.items():
                for column, width in widths.items():
                    owner = self._owners[cell.replica, (row, column)]
                    if owner != cell.rank:
                        found[owner, cell.rank] += self._values(number, height * width) * images
        return found

    # Helpers

    def _idle(self, kind: Kind, part: Pass, messages: Messages) -> Stage:
        return Stage(kind, part, messages, (0,) * self.processes)

    def _shares(self) -> list[int]:
        """Number of images of every cell."""
        shares = balanced(self.images, 1 + max(cell.replica for cell in self.cells))
        return [len(shares[cell.replica]) for cell in self.cells]

    def _per_process(self, per_tile: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
        """Sum a count per image and tile over the images and tiles of each process."""
        found = [0] * self.processes
        for cell, images in zip(self.cells, self._shares(), strict=True):
            found[cell.rank] += images * per_tile[cell.tile]
        return tuple(found)

    def _core(self, number: int, tile: tuple[int, int]) -> Region:
        return self.schedule.tiling.core(number, tile)

    def _values(self, number: int, pixels: int) -> int:
        return self.schedule.tiling.layers.maps[number].channels * pixels


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
