"""Which process holds and which one needs each part of a feature map: tiles over processes, and the gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from snugfit.tiling.exchange import Exchange, Shard
from snugfit.tiling.geometry import Interval, balanced
from snugfit.tiling.layers import EMPTY_REGION, Region
from snugfit.tiling.schedule import Schedule
from snugfit.tiling.step_cost import GATEWAY


@dataclass(frozen=True)
class Cell:
    """A tile of some images, and the process that computes it.

    Attributes:
        rank: of the process.
        replica: which share of the batch.
        tile: row and column.
    """

    rank: int
    replica: int
    tile: tuple[int, int]


def cells_of(tiles: Sequence[tuple[int, int]], replicas: int, processes: int) -> tuple[Cell, ...]:
    """Distribute the tiles of every replica over processes, as evenly as possible.

    Args:
        tiles: rows and columns.
        replicas: shares of the batch.
        processes: at most one per cell has work.
    """
    pairs = [(replica, tile) for replica in range(replicas) for tile in tiles]
    owners = [rank for rank, part in enumerate(balanced(len(pairs), processes)) for _ in range(len(part))]
    return tuple(Cell(rank, replica, tile) for rank, (replica, tile) in zip(owners, pairs, strict=True))


Source = Literal["gateway", "cores", "everyone"]
"""Who has a feature map: the gateway all of it, every cell its core, or every process all of it."""


@dataclass(frozen=True)
class Wanted:
    """What cells need of a feature map.

    Attributes:
        what: the halo of a forward group, of a backward group's gradient or of its first feature map for recomputation;
            or the whole feature map, on the gateway or on every process.
        group: number of the group.
    """

    what: Literal["forward", "backward", "recompute", "gateway", "everyone"]
    group: int = 0


class Routes:
    """Exchanges of feature maps in a schedule.

    Args:
        schedule: what every tile holds, fetches and computes.
        cells: tiles of all processes.
        processes: number of processes, including those without a tile; by default as many as have one.
    """

    def __init__(self, schedule: Schedule, cells: Sequence[Cell], processes: int | None = None) -> None:
        self.schedule, self.cells = schedule, tuple(cells)
        self.processes = processes or 1 + max(cell.rank for cell in self.cells)
        self.replicas = 1 + max(cell.replica for cell in self.cells)
        self.exchange: Callable[[int, Source, Wanted, int], Exchange] = lru_cache(maxsize=256)(self._exchange)

    def core(self, number: int, cell: int) -> Region:
        """The part of a feature map that belongs to a cell."""
        return self.schedule.tiling.core(number, self.cells[cell].tile)

    def pixels(self, number: int, images: int, processes: int) -> list[int]:
        """Number of pixels of a feature map, of all images, that belong to each process."""
        counts, shares = [0] * processes, balanced(images, self.replicas)
        for index, cell in enumerate(self.cells):
            counts[cell.rank] += len(shares[cell.replica]) * self.core(number, index).area
        return counts

    def _exchange(self, number: int, source: Source, wanted: Wanted, images: int) -> Exchange:
        """The exchange of a feature map for a batch of images."""
        size = self.schedule.tiling.layers.maps[number]
        everyone = tuple(Shard(rank, Interval.whole(images), size.whole) for rank in range(self.processes))
        whole = {"gateway": everyone[: GATEWAY + 1], "everyone": everyone}
        held = whole.get(source) or self._places(lambda cell: self.core(number, cell), images)
        places = whole.get(wanted.what) or self._places(lambda cell: self._region(wanted, number, cell), images)
        return Exchange(held, places, size.channels)

    def _places(self, region: Callable[[int], Region], images: int) -> tuple[Shard, ...]:
        """Shards of all cells, in order."""
        shares = balanced(images, self.replicas)
        return tuple(Shard(cell.rank, shares[cell.replica], region(number)) for number, cell in enumerate(self.cells))

    def _region(self, wanted: Wanted, number: int, cell: int) -> Region:
        tile = self.cells[cell].tile
        if wanted.what == "forward":
            return self.schedule.forward_groups[tile][wanted.group][number]
        group = self.schedule.backward_groups[tile][wanted.group]
        return (group.entries if wanted.what == "recompute" else group.gradients).get(number, EMPTY_REGION)
