"""Exchange of parts of a feature map, over point-to-point messages.

One rule covers halos of any width, corners, tiles within one process, and the ways from the gateway to tiles, back, and
from tiles to everyone: every needed part that another process holds is sent. All that one process sends another is one
message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from snugfit.tiling.geometry import Interval
from snugfit.tiling.layers import Region
from snugfit.tiling.transport import Handle, Transport


@dataclass(frozen=True)
class Shard:
    """A part of a feature map at a process.

    Attributes:
        rank: of the process.
        images: of the batch.
        region: of the feature map.
    """

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
        held: parts of a feature map. Those of one process do not overlap; those of two do only where both have all of
            it.
        wanted: parts that are needed; what no shard holds stays uninitialised.
        channels: of the feature map.
    """

    held: tuple[Shard, ...]
    wanted: tuple[Shard, ...]
    channels: int

    @cached_property
    def transfers(self) -> list[Transfer]:
        """All copies and messages, in the same order on all processes.

        A process that holds all it needs is sent nothing.
        """
        found = []
        for target, want in enumerate(self.wanted):
            transfers = [Transfer(source, target, have.common(want)) for source, have in enumerate(self.held)]
            own = [each for each in transfers if each.part.rank == want.rank and each.part.pixels == want.pixels]
            found += [each for each in own or transfers if each.part.pixels]
        return found

    def transfers_between(self, sender: int, receiver: int) -> list[Transfer]:
        """The transfers from one process to another."""
        return self._by_pair.get((sender, receiver), [])

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], list[Transfer]]:
        found: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in self.transfers:
            pair = (self.held[transfer.source].rank, self.wanted[transfer.target].rank)
            found.setdefault(pair, []).append(transfer)
        return found

    def sent(self, rank: int) -> int:
        """Number of values that a process sends."""
        return self.channels * sum(
            transfer.part.pixels
            for transfer in self.transfers
            if self.held[transfer.source].rank == rank != self.wanted[transfer.target].rank
        )

    def received(self, rank: int) -> int:
        """Number of values that a process receives."""
        return self.channels * sum(
            transfer.part.pixels
            for transfer in self.transfers
            if self.wanted[transfer.target].rank == rank != self.held[transfer.source].rank
        )

    def start(self, values: Mapping[int, Tensor], transport: Transport, like: Tensor) -> Pending:
        """Begin to send; the values may not change until :meth:`Pending.wait` has returned.

        Args:
            values: what this process holds, (B, C, h, w), by number of the shard.
            transport: to the other processes.
            like: an example tensor of any shape, with the type and device of the feature map.
        """
        rank = transport.rank
        outgoing, incoming = dict[int, Tensor](), dict[int, Tensor]()
        packed: dict[tuple[Shard, ...], Tensor] = {}  # equal messages share memory
        for peer in sorted({place.rank for place in (*self.held, *self.wanted)} - {rank}):
            transfers = self.transfers_between(rank, peer)
            if transfers:
                key = tuple(transfer.part for transfer in transfers)
                if key not in packed:
                    parts = [
                        transfer.part.of(values[transfer.source], self.held[transfer.source]) for transfer in transfers
                    ]
                    packed[key] = torch.cat([part.reshape(-1) for part in parts])
                outgoing[peer] = packed[key]
            size = self.channels * sum(transfer.part.pixels for transfer in self.transfers_between(peer, rank))
            if size:
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
        found: dict[int, Tensor] = {}
        mine = [number for number, want in enumerate(self.exchange.wanted) if want.rank == self.rank]
        for number in mine:
            found[number] = self._with_own(number)
        for work in self.works:
            work.wait()
        for peer, flat in self.incoming.items():
            start = 0
            for transfer in self.exchange.transfers_between(peer, self.rank):
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
        found = torch.empty(
            shape,
            dtype=self.like.dtype,
            device=self.like.device,
            memory_format=torch.channels_last if last else torch.contiguous_format,
        )
        for transfer in own:
            part = transfer.part.of(found, want)
            part.copy_(transfer.part.of(self.values[transfer.source], self.exchange.held[transfer.source]))
        return found
