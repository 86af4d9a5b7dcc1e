"""Communication between processes that hold tiles, and a dry run of it on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from snugfit.tiling.step_cost import DIRECT, GATEWAY


class Handle(Protocol):
    """An operation that is under way."""

    def wait(self) -> object:
        """Wait until it is done."""


class GatherHandle(Protocol):
    """An all-gather that is under way."""

    def wait(self) -> list[Tensor]:
        """The tensors, of one shape, in the order of ranks."""


class Transport(Protocol):
    """Communication that tiles need.

    Attributes:
        rank: of this process.
        size: number of processes.
    """

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[Handle]:
        """Begin to send flat tensors (n,) to others and to receive flat tensors (n,) from them, by rank."""

    def all_reduce(self, flat: Tensor) -> None:
        """Add up a tensor (n,) over processes, in place."""

    def begin_all_reduce(self, flat: Tensor) -> Handle:
        """Begin to add up a tensor (n,) over processes, in place."""

    def gather(self, tensor: Tensor) -> GatherHandle:
        """Begin to send the tensors of all processes, of one shape, to all."""

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        """The tensors (n,) of all processes, in the order of ranks."""

    def reduce_at_gateway(self, flat: Tensor) -> None:
        """Add up a tensor (n,) in place on the gateway; it is undefined on other processes afterwards."""

    def broadcast(self, flat: Tensor) -> None:
        """Fill a tensor (n,) with the gateway's."""


@dataclass(frozen=True)
class Gathered:
    """Tensors of all processes, of one shape, and the operations that must end first."""

    tensors: list[Tensor]
    works: Sequence[Handle] = ()

    def wait(self) -> list[Tensor]:
        """The tensors, of one shape, in the order of ranks."""
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(frozen=True)
class ProcessTransport:
    """Transport over a process group of ``torch.distributed``; all processes by default."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of processes."""
        return dist.get_world_size(self.group)

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[Handle]:
        """Send and receive flat tensors (n,) in one batch of point-to-point messages.

        Receives come first: gloo sends nothing before the other side has said that it is ready to receive, and that
        message would queue behind this side's own data. Both directions of a slow link would then take turns.
        """
        messages = [dist.P2POp(dist.irecv, flat, group_peer=rank, group=self.group) for rank, flat in incoming.items()]
        messages += [dist.P2POp(dist.isend, flat, group_peer=rank, group=self.group) for rank, flat in outgoing.items()]
        works: list[Handle] = list(dist.batch_isend_irecv(messages)) if messages else []
        return works

    def all_reduce(self, flat: Tensor) -> None:
        """All-reduce a tensor (n,)."""
        dist.all_reduce(flat, group=self.group)

    def begin_all_reduce(self, flat: Tensor) -> Handle:
        """Begin an all-reduce of a tensor (n,)."""
        work: Handle = dist.all_reduce(flat, group=self.group, async_op=True)
        return work

    def gather(self, tensor: Tensor) -> Gathered:
        """Gather tensors of one shape by direct messages, or by an all-gather if there are many processes."""
        found = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.size)]
        if self.size > DIRECT:
            work = dist.all_gather(found, tensor.clone(), group=self.group, async_op=True)
            return Gathered(found, [work])
        others = [rank for rank in range(self.size) if rank != self.rank]
        return Gathered(found, self.swap({rank: tensor for rank in others}, {rank: found[rank] for rank in others}))

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        """Gather tensors (n,) and wait for them."""
        return self.gather(flat).wait()

    def reduce_at_gateway(self, flat: Tensor) -> None:
        """Reduce a tensor (n,) to the gateway."""
        dist.reduce(flat, group_dst=GATEWAY, group=self.group)

    def broadcast(self, flat: Tensor) -> None:
        """Broadcast a tensor (n,) from the gateway."""
        dist.broadcast(flat, group_src=GATEWAY, group=self.group)


@dataclass(frozen=True)
class DryRunTransport:
    """A transport without other processes, to measure what one process needs: it receives zeros."""

    rank: int = 0
    size: int = 1

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[Handle]:
        """Fill the incoming tensors (n,) with zeros."""
        for flat in incoming.values():
            flat.zero_()
        return []

    def all_reduce(self, flat: Tensor) -> None:
        """Leave the tensor (n,) as it is."""

    def begin_all_reduce(self, flat: Tensor) -> Handle:
        """Leave the tensor (n,) as it is."""
        return Gathered([flat])

    def gather(self, tensor: Tensor) -> Gathered:
        """Repeat the tensor, of any shape, for every process."""
        return Gathered([tensor] * self.size)

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        """Repeat the tensor (n,) for every process."""
        return [flat] * self.size

    def reduce_at_gateway(self, flat: Tensor) -> None:
        """Leave the tensor (n,) as it is."""

    def broadcast(self, flat: Tensor) -> None:
        """Leave the tensor (n,) as it is."""


def world_size() -> int:
    """Number of processes; 1 if ``torch.distributed`` was not started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
