"""Communication between processes that hold tiles, a dry run of it on one process, and what is sent but feature maps.

That is commands as text, tensors by name, and sums of gradients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from snugfit.tiling.step_cost import DIRECT, GATEWAY

BUCKET_BYTES = 2_000_000


class Handle(Protocol):
    """An operation that is under way."""

    def wait(self) -> object:
        """Wait until it is done."""


class GatherHandle(Protocol):
    """An all-gather that is under way."""

    def wait(self) -> list[Tensor]:
        """The tensors, of one shape, in the order of ranks."""


class Transport(Protocol):
    """Communication that tiles need."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Sequence[Handle]:
        """Begin to send flat tensors (n,) to others and to receive flat tensors (n,) from them, by rank."""

    def all_reduce(self, flat: Tensor) -> Handle:
        """Begin to add up a tensor (n,) over processes, in place."""

    def gather(self, tensor: Tensor) -> GatherHandle:
        """Begin to send the tensors of all processes, of one shape, to all."""

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

        Receives come first: gloo sends nothing before the other side is ready to receive, and the message that says so
        would queue behind this side's own data. Both directions of a slow link would then take turns.
        """
        messages = [dist.P2POp(dist.irecv, flat, group_peer=rank, group=self.group) for rank, flat in incoming.items()]
        messages += [dist.P2POp(dist.isend, flat, group_peer=rank, group=self.group) for rank, flat in outgoing.items()]
        works: list[Handle] = list(dist.batch_isend_irecv(messages)) if messages else []
        return works

    def all_reduce(self, flat: Tensor) -> Handle:
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

    def all_reduce(self, flat: Tensor) -> Handle:
        """Leave the tensor (n,) as it is."""
        return Gathered([flat])

    def gather(self, tensor: Tensor) -> Gathered:
        """Repeat the tensor, of any shape, for every process."""
        return Gathered([tensor] * self.size)

    def reduce_at_gateway(self, flat: Tensor) -> None:
        """Leave the tensor (n,) as it is."""

    def broadcast(self, flat: Tensor) -> None:
        """Leave the tensor (n,) as it is."""


def world_size() -> int:
    """Number of processes; 1 if ``torch.distributed`` was not started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_reduce(tensors: Sequence[Tensor], transport: Transport) -> None:
    """Add up tensors of any shapes over processes, in place, in few messages."""
    if transport.size > 1:
        for some in buckets(tensors):
            with flattened(some) as flat:
                transport.all_reduce(flat).wait()


class OverlappedAllReduce:
    """All-reduce of tensors that become ready one after another, in the same order on all processes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._ready: list[Tensor] = []
        self._under_way: list[tuple[AbstractContextManager[Tensor], Handle]] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add tensors of any shapes that are complete; they travel once they fill a message of some megabytes."""
        for tensor in tensors:
            self._ready.append(tensor)
            if sum(each.numel() * each.element_size() for each in self._ready) >= BUCKET_BYTES:
                self._send()

    def wait(self) -> None:
        """Wait until all tensors hold their sums."""
        if self._ready:
            self._send()
        while self._under_way:
            self._end_first()

    def _send(self) -> None:
        if len(self._under_way) > 1:  # so that copies stay few
            self._end_first()
        message = flattened(self._ready)
        self._under_way.append((message, self._transport.all_reduce(message.__enter__())))
        self._ready = []

    def _end_first(self) -> None:
        message, work = self._under_way.pop(0)
        work.wait()
        message.__exit__(None, None, None)


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors of any shapes, in order, into messages of some megabytes, so that copies stay small."""
    found: list[list[Tensor]] = []
    headroom = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not found or size > headroom:
            found.append([])
            headroom = BUCKET_BYTES
        found[-1].append(tensor)
        headroom -= size
    return found


@contextmanager
def flattened(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Flatten tensors of any shapes and types into one tensor (n,), and copy its values back at the end."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        yield tensors[0].view(-1)
        return
    fractions = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    kind = max(fractions or [tensor.dtype for tensor in tensors], key=lambda t: t.itemsize)
    flat = torch.cat([tensor.reshape(-1).to(kind) for tensor in tensors])
    yield flat
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


class CommandChannel(Protocol):
    """Text from the gateway to all others, which may wait long for it."""

    def send(self, command: str) -> None:
        """Send to all others."""

    def receive(self) -> str:
        """Wait for the gateway's next command."""


class NullChannel:
    """A channel without receivers, for measuring one process alone."""

    def send(self, command: str) -> None:
        """Do nothing."""

    def receive(self) -> str:
        """Fail, because there is no sender.

        Raises:
            LookupError: always.
        """
        raise LookupError("a channel without a sender has no commands")


def send_tensors(tensors: dict[str, Tensor], transport: Transport) -> None:
    """Send tensors of any shapes by name to all others: types and shapes, then one at a time to keep copies small."""
    if transport.size > 1 and not any(tensor.is_meta for tensor in tensors.values()):
        forms = [(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in tensors.items()]
        content = torch.frombuffer(bytearray(json.dumps(forms).encode()), dtype=torch.uint8)
        transport.broadcast(torch.tensor([len(content)], dtype=torch.int64))
        transport.broadcast(content)
        for each in tensors.values():
            send_tensor(each, transport)


def receive_tensors(transport: Transport) -> dict[str, Tensor]:
    """Wait for the gateway's tensors, in their shapes, by name."""
    size = torch.zeros(1, dtype=torch.int64)
    transport.broadcast(size)
    content = torch.empty(int(size), dtype=torch.uint8)
    transport.broadcast(content)
    forms = json.loads(bytes(content.numpy()))
    return {name: receive_tensor(shape, getattr(torch, dtype), transport) for name, dtype, shape in forms}


def send_tensor(tensor: Tensor, transport: Transport) -> None:
    """Send a tensor of any shape to all others, which know its type and shape."""
    if tensor.numel() and transport.size > 1 and not tensor.is_meta:
        transport.broadcast(_bytes(tensor.detach().cpu().contiguous()))


def receive_tensor(shape: Sequence[int], dtype: torch.dtype, transport: Transport) -> Tensor:
    """Wait for a tensor of this shape from the gateway; on the CPU."""
    found = torch.empty(tuple(shape), dtype=dtype)
    if found.numel():
        transport.broadcast(_bytes(found))
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor as bytes, (n,)."""
    return tensor.view(-1).view(torch.uint8)
