"""Messages of the gateway to the other processes: commands as text, and tensors by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from snugfit.tiling.transport import Transport


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
    """Send tensors of any shapes by name to all others.

    Their types and shapes, then one at a time to keep copies small.
    """
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
