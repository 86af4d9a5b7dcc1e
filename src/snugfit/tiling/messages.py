"""What the gateway tells the others: orders as text, and tensors by name."""

from __future__ import annotations

from typing import Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from snugfit.tiling.transport import Transport


class Line(Protocol):
    """Text from the gateway to all others, who may have to wait long for it."""

    def give(self, command: str) -> None:
        """Tell all others."""

    def take(self) -> str:
        """Wait for what the gateway tells next."""


class Silence:
    """Nobody listens: what is said by one who only behaves as if there were others."""

    def give(self, command: str) -> None:
        """Say nothing."""

    def take(self) -> str:
        """Nothing is ever said.

        Raises:
            LookupError: always.
        """
        raise LookupError("nobody gives orders")


def send_tensors(tensors: dict[str, Tensor], transport: Transport) -> None:
    """Send tensors by name to all others."""
    if transport.size > 1 and not any(tensor.is_meta for tensor in tensors.values()):
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        transport.from_gateway(torch.tensor([len(content)], dtype=torch.int64))
        transport.from_gateway(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def receive_tensors(transport: Transport) -> dict[str, Tensor]:
    """Wait for the gateway's tensors."""
    size = torch.zeros(1, dtype=torch.int64)
    transport.from_gateway(size)
    content = torch.empty(int(size), dtype=torch.uint8)
    transport.from_gateway(content)
    return load(bytes(content.numpy()))
