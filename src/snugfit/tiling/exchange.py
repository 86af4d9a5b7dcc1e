"""Parts of a map from those who hold them to those who need them, over point-to-point sends.

One rule serves halos of any width, corners, tiles of one process among each other, the way from the gateway to tiles
and back, and from tiles to everyone: whatever of a wanted part somebody else holds is sent. All that one process sends
another is one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from snugfit.tiling.geometry import Interval
from snugfit.tiling.layers import Region
from snugfit.tiling.transport import Transport, Waiting


@dataclass(frozen=True)
class Place:
    """A part of a map at a process.

    Attributes:
        rank: of the process.
        images: of the batch.
        region: of the map.
    """

    rank: int
    images: Interval
    region: Region

    def common(self, other: Place) -> Place:
        """What of it lies in another one too."""
        return Place(self.rank, self.images & other.images, self.region & other.region)

    @property
    def pixels(self) -> int:
        """Of all its images."""
        return len(self.images) * self.region.area

    def of(self, values: Tensor, held: Place) -> Tensor:
        """A view of it in the values (B, C, h, w) of a place that holds it."""
        rows, columns = self.region.rows.within(held.region.rows), self.region.columns.within(held.region.columns)
        return values[self.images.within(held.images), :, rows, columns]


@dataclass(frozen=True)
class Piece:
    """What one place gives another: numbers of both, and the part."""

    source: int
    target: int
    part: Place


@dataclass(frozen=True)
class Exchange:
    """Who sends what to whom; the same on all processes.

    Attributes:
        held: parts of a map. Those of one process overlap nowhere; those of two do only where both have the whole map.
        wanted: parts that are needed; what nobody holds of them is left as it is.
        channels: of the map.
    """

    held: tuple[Place, ...]
    wanted: tuple[Place, ...]
    channels: int

    @cached_property
    def pieces(self) -> list[Piece]:
        """All that has to be copied or sent, in one order on all processes; nothing is sent to who holds it all."""
        found = []
        for target, want in enumerate(self.wanted):
            pieces = [Piece(source, target, have.common(want)) for source, have in enumerate(self.held)]
            own = [each for each in pieces if each.part.rank == want.rank and each.part.pixels == want.pixels]
            found += [each for each in own or pieces if each.part.pixels]
        return found

    def between(self, sender: int, receiver: int) -> list[Piece]:
        """What one process sends another."""
        return self._by_pair.get((sender, receiver), [])

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], list[Piece]]:
        found: dict[tuple[int, int], list[Piece]] = {}
        for piece in self.pieces:
            pair = (self.held[piece.source].rank, self.wanted[piece.target].rank)
            found.setdefault(pair, []).append(piece)
        return found

    def sent(self, rank: int) -> int:
        """Values that a process sends others."""
        return self.channels * sum(
            piece.part.pixels
            for piece in self.pieces
            if self.held[piece.source].rank == rank != self.wanted[piece.target].rank
        )

    def received(self, rank: int) -> int:
        """Values that a process is sent by others."""
        return self.channels * sum(
            piece.part.pixels
            for piece in self.pieces
            if self.wanted[piece.target].rank == rank != self.held[piece.source].rank
        )

    def start(self, values: Mapping[int, Tensor], transport: Transport, like: Tensor) -> Pending:
        """Begin to send; what is sent may not change until :meth:`Pending.wait` has returned.

        Args:
            values: what this process holds, (B, C, h, w), by number of its place.
            transport: to the other processes.
            like: a tensor with the type and device of the map.
        """
        rank = transport.rank
        outgoing, incoming = dict[int, Tensor](), dict[int, Tensor]()
        packed: dict[tuple[Place, ...], Tensor] = {}  # what several are sent alike is in memory once
        for peer in sorted({place.rank for place in (*self.held, *self.wanted)} - {rank}):
            pieces = self.between(rank, peer)
            if pieces:
                alike = tuple(piece.part for piece in pieces)
                if alike not in packed:
                    parts = [piece.part.of(values[piece.source], self.held[piece.source]) for piece in pieces]
                    packed[alike] = torch.cat([part.reshape(-1) for part in parts])
                outgoing[peer] = packed[alike]
            size = self.channels * sum(piece.part.pixels for piece in self.between(peer, rank))
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
    works: Sequence[Waiting]
    outgoing: Sequence[Tensor]
    incoming: Mapping[int, Tensor]

    def wait(self) -> dict[int, Tensor]:
        """The parts that this process wanted, by number; what it holds already as it is wanted is not copied."""
        found: dict[int, Tensor] = {}
        mine = [number for number, want in enumerate(self.exchange.wanted) if want.rank == self.rank]
        for number in mine:
            found[number] = self._with_own(number)
        for work in self.works:
            work.wait()
        for peer, flat in self.incoming.items():
            start = 0
            for piece in self.exchange.between(peer, self.rank):
                part = piece.part.of(found[piece.target], self.exchange.wanted[piece.target])
                part.copy_(flat[start : start + part.numel()].view(part.shape))
                start += part.numel()
        return found

    def _with_own(self, number: int) -> Tensor:
        """A wanted part with all that this process holds of it."""
        want = self.exchange.wanted[number]
        own = [
            piece
            for piece in self.exchange.pieces
            if piece.target == number and self.exchange.held[piece.source].rank == self.rank
        ]
        if len(own) == 1 and own[0].part.pixels == want.pixels:
            return own[0].part.of(self.values[own[0].source], self.exchange.held[own[0].source])
        shape = (len(want.images), self.exchange.channels, len(want.region.rows), len(want.region.columns))
        last = any(self.values[piece.source].stride(1) == 1 for piece in own) and shape[1] > 1
        found = torch.empty(
            shape, dtype=self.like.dtype, device=self.like.device,
            memory_format=torch.channels_last if last else torch.contiguous_format,
        )  # fmt: skip
        for piece in own:
            part = piece.part.of(found, want)
            part.copy_(piece.part.of(self.values[piece.source], self.exchange.held[piece.source]))
        return found
