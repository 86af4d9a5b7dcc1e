"""How processes that hold tiles reach each other; or one process that only behaves as if there were others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from snugfit.tiling.step_cost import DIRECT


class Handle(Protocol):
    """Something that is under way."""

    def wait(self) -> object:
        """Return when it is done."""


class GatherHandle(Protocol):
    """Tensors of all processes, on their way to all."""

    def wait(self) -> list[Tensor]:
        """These, in the order of ranks."""


class Transport(Protocol):
    """What tiles need of a group of processes.

    Attributes:
        rank: of this process.
        size: processes.
    """

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def size(self) -> int:
        """Processes."""

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[Handle]:
        """Begin to send flat tensors to others, and to fill flat tensors with what they send, by rank."""

    def all_reduce(self, flat: Tensor) -> None:
        """Add up a tensor over processes, in place."""

    def begin_all_reduce(self, flat: Tensor) -> Handle:
        """Begin to add up a tensor over processes, in place."""

    def gather(self, tensor: Tensor) -> GatherHandle:
        """Begin to give all processes the tensors of all."""

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        """The tensors of all processes, in the order of ranks."""

    def reduce_at_gateway(self, flat: Tensor) -> None:
        """Add up a tensor over processes, in place on the gateway; what others have is undefined afterwards."""

    def broadcast(self, flat: Tensor) -> None:
        """Fill a tensor with the gateway's."""


GATEWAY = 0
"""Rank of the process that has images, labels and the rest of the network."""


@dataclass(frozen=True)
class Gathered:
    """Tensors of all processes, and what has to end until they are there."""

    tensors: list[Tensor]
    works: Sequence[Handle] = ()

    def wait(self) -> list[Tensor]:
        """Tensors in the order of ranks."""
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(frozen=True)
class ProcessTransport:
    """The processes of a group of ``torch.distributed``; all by default."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Of this process."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Processes."""
        return dist.get_world_size(self.group)

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[Handle]:
        """Batched point-to-point sends.

        Receives come first: gloo sends nothing before the other side has told that it is ready to receive, and what
        tells that would queue behind this side's own data. Both directions of a slow link would take turns.
        """
        messages = [dist.P2POp(dist.irecv, flat, group_peer=rank, group=self.group) for rank, flat in incoming.items()]
        messages += [dist.P2POp(dist.isend, flat, group_peer=rank, group=self.group) for rank, flat in outgoing.items()]
        works: list[Handle] = list(dist.batch_isend_irecv(messages)) if messages else []
        return works

    def all_reduce(self, flat: Tensor) -> None:
        """An all-reduce."""
        dist.all_reduce(flat, group=self.group)

    def begin_all_reduce(self, flat: Tensor) -> Handle:
        """An all-reduce beside other work."""
        work: Handle = dist.all_reduce(flat, group=self.group, async_op=True)
        return work

    def gather(self, tensor: Tensor) -> Gathered:
        """Messages from everyone to everyone; an all-gather where there are many."""
        found = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.size)]
        if self.size > DIRECT:
            work = dist.all_gather(found, tensor.clone(), group=self.group, async_op=True)
            return Gathered(found, [work])
        others = [rank for rank in range(self.size) if rank != self.rank]
        return Gathered(found, self.swap({rank: tensor for rank in others}, {rank: found[rank] for rank in others}))

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        """The same, waited for."""
        return self.gather(flat).wait()

    def reduce_at_gateway(self, flat: Tensor) -> None:
        """A reduction."""
        dist.reduce(flat, group_dst=GATEWAY, group=self.group)

    def broadcast(self, flat: Tensor) -> None:
        """A broadcast."""
        dist.broadcast(flat, group_src=GATEWAY, group=self.group)


@dataclass(frozen=True)
class DryRunTransport:
    """One of several processes of which no other is there, to measure what it needs: it is sent zeros."""

    rank: int = 0
    size: int = 1

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[Handle]:
        """Nothing is sent."""
        for flat in incoming.values():
            flat.zero_()
        return []

    def all_reduce(self, flat: Tensor) -> None:
        """There is nothing to add."""

    def begin_all_reduce(self, flat: Tensor) -> Handle:
        """There is nothing to add."""
        return Gathered([flat])

    def gather(self, tensor: Tensor) -> Gathered:
        """The same from all."""
        return Gathered([tensor] * self.size)

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        """The same from all."""
        return [flat] * self.size

    def reduce_at_gateway(self, flat: Tensor) -> None:
        """There is nothing to add."""

    def broadcast(self, flat: Tensor) -> None:
        """This is the gateway."""


def world_size() -> int:
    """How many processes there are; 1 where ``torch.distributed`` was not started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
