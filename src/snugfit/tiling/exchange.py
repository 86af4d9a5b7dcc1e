"""Which process holds and which one needs each part of a feature map, and the messages between them.

One rule covers halos of any width, corners, tiles within one process, and what travels from the gateway to tiles, back,
and from tiles to everyone: every needed part that another process holds is sent. All that one process sends another is
one message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from snugfit.tiling.geometry import Interval, balanced
from snugfit.tiling.layers import EMPTY_REGION, Region
from snugfit.tiling.schedule import Schedule
from snugfit.tiling.step_cost import GATEWAY
from snugfit.tiling.transport import Handle, Transport


@dataclass(frozen=True)
class Shard:
    """A region of a feature map, for some images of the batch, at a process."""

    rank: int
    images: Interval
    region: Region

    def common(self, other: Shard) -> Shard:
        """The intersection with another shard."""
        return Shard(self.rank, self.images & other.images, self.region & other.region)

    @property
    def pixels(self) -> int:
        """Number of pixels in all its images."""
        return len(self.images) * self.region.area

    def of(self, values: Tensor, held: Shard) -> Tensor:
        """A view (B, C, h, w) of it in the values (B, C, H, W) of a shard that contains it."""
        rows, columns = self.region.rows.within(held.region.rows), self.region.columns.within(held.region.columns)
        return values[self.images.within(held.images), :, rows, columns]


@dataclass(frozen=True)
class Transfer:
    """A part that one shard gives another: numbers of both, and the part."""

    source: int
    target: int
    part: Shard


@dataclass(frozen=True)
class Exchange:
    """Who sends what to whom; the same on all processes.

    Attributes:
        held: parts of a feature map. Those of one process do not overlap; those of two only where both have all of it.
        wanted: parts that are needed; what no shard holds stays uninitialised.
        channels: of the feature map.
    """

    held: tuple[Shard, ...]
    wanted: tuple[Shard, ...]
    channels: int

    @cached_property
    def transfers(self) -> list[Transfer]:
        """All copies and messages, in order; a process that holds all it needs is sent nothing."""
        found = []
        for target, want in enumerate(self.wanted):
            transfers = [Transfer(source, target, have.common(want)) for source, have in enumerate(self.held)]
            own = [each for each in transfers if each.part.rank == want.rank and each.part.pixels == want.pixels]
            found += [each for each in own or transfers if each.part.pixels]
        return found

    @cached_property
    def messages(self) -> dict[tuple[int, int], list[Transfer]]:
        """The transfers from one rank to another."""
        found: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in self.transfers:
            pair = (self.held[transfer.source].rank, self.wanted[transfer.target].rank)
            found.setdefault(pair, []).append(transfer)
        return found

    def start(self, values: Mapping[int, Tensor], transport: Transport, like: Tensor) -> Pending:
        """Begin to send what this process holds, (B, C, h, w), by number of the shard.

        The values may not change until :meth:`Pending.wait` has returned. ``like`` is an example tensor of any shape
        with the type and device of the feature map.
        """
        rank = transport.rank
        outgoing, incoming = dict[int, Tensor](), dict[int, Tensor]()
        packed: dict[tuple[Shard, ...], Tensor] = {}  # equal messages share memory
        for peer in sorted({place.rank for place in (*self.held, *self.wanted)} - {rank}):
            if transfers := self.messages.get((rank, peer)):
                key = tuple(each.part for each in transfers)
                if key not in packed:
                    parts = [each.part.of(values[each.source], self.held[each.source]) for each in transfers]
                    packed[key] = torch.cat([part.reshape(-1) for part in parts])
                outgoing[peer] = packed[key]
            if size := self.channels * sum(each.part.pixels for each in self.messages.get((peer, rank), ())):
                incoming[peer] = like.new_empty(size)
        works = transport.swap(outgoing, incoming)
        return Pending(self, values, rank, like, works, list(outgoing.values()), incoming)


@dataclass(frozen=True)
class Pending:
    """An exchange that is under way."""

    exchange: Exchange
    values: Mapping[int, Tensor]
    rank: int
    like: Tensor
    works: Sequence[Handle]
    outgoing: Sequence[Tensor]
    incoming: Mapping[int, Tensor]

    def wait(self) -> dict[int, Tensor]:
        """The parts (B, C, h, w) that this process needs, by number; a part that it already holds is a view."""
        mine = [number for number, want in enumerate(self.exchange.wanted) if want.rank == self.rank]
        found = {number: self._with_own(number) for number in mine}
        for work in self.works:
            work.wait()
        for peer, flat in self.incoming.items():
            start = 0
            for transfer in self.exchange.messages[peer, self.rank]:
                part = transfer.part.of(found[transfer.target], self.exchange.wanted[transfer.target])
                part.copy_(flat[start : start + part.numel()].view(part.shape))
                start += part.numel()
        return found

    def _with_own(self, number: int) -> Tensor:
        """A needed part (B, C, h, w), filled with all that this process holds of it."""
        want = self.exchange.wanted[number]
        own = [
            transfer
            for transfer in self.exchange.transfers
            if transfer.target == number and self.exchange.held[transfer.source].rank == self.rank
        ]
        if len(own) == 1 and own[0].part.pixels == want.pixels:
            return own[0].part.of(self.values[own[0].source], self.exchange.held[own[0].source])
        shape = (len(want.images), self.exchange.channels, len(want.region.rows), len(want.region.columns))
        last = any(self.values[transfer.source].stride(1) == 1 for transfer in own) and shape[1] > 1
        found = empty_map(shape, self.like, last=last)
        for transfer in own:
            part = transfer.part.of(found, want)
            part.copy_(transfer.part.of(self.values[transfer.source], self.exchange.held[transfer.source]))
        return found


def empty_map(shape: tuple[int, ...], like: Tensor, *, last: bool) -> Tensor:
    """A new tensor (B, C, H, W) of the type and on the device of ``like``, in channels_last or row-major."""
    order = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=order)


@dataclass(frozen=True)
class Cell:
    """A tile, by row and column, of a share of the batch (``replica``), and the rank that computes it."""

    rank: int
    replica: int
    tile: tuple[int, int]


def cells_of(tiles: Sequence[tuple[int, int]], replicas: int, processes: int) -> tuple[Cell, ...]:
    """Distribute the tiles of every replica over processes, as evenly as possible; at most one per cell has work."""
    pairs = [(replica, tile) for replica in range(replicas) for tile in tiles]
    owners = [rank for rank, part in enumerate(balanced(len(pairs), processes)) for _ in range(len(part))]
    return tuple(Cell(rank, replica, tile) for rank, (replica, tile) in zip(owners, pairs, strict=True))


Source = Literal["gateway", "cores", "everyone"]
"""Who has a feature map: the gateway all of it, every cell its core, or every process all of it."""


@dataclass(frozen=True)
class Wanted:
    """What cells need of a feature map.

    The halo of a forward group, of a backward group's gradient or of its first feature map for recomputation; or the
    whole feature map, on the gateway or on every process.
    """

    what: Literal["forward", "backward", "recompute", "gateway", "everyone"]
    group: int = 0


class Routes:
    """Exchanges of feature maps in a schedule, between processes with and without tiles."""

    def __init__(self, schedule: Schedule, cells: Sequence[Cell], processes: int) -> None:
        self.schedule, self.cells, self.processes = schedule, tuple(cells), processes
        self.replicas = 1 + max(cell.replica for cell in self.cells)
        self.exchange: Callable[[int, Source, Wanted, int], Exchange] = lru_cache(maxsize=256)(self._exchange)

    def core(self, number: int, cell: int) -> Region:
        """The part of a feature map that belongs to a cell."""
        return self.schedule.tiling.core(number, self.cells[cell].tile)

    def pixels(self, number: int, images: int) -> list[int]:
        """Number of pixels of a feature map, of all images, that belong to each process."""
        counts, shares = [0] * self.processes, balanced(images, self.replicas)
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
