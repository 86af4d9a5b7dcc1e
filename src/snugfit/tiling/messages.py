"""Text and tensors by name from the gateway to the others, who may wait for them as long as it takes."""

from __future__ import annotations

import torch
from safetensors.torch import load, save
from torch import Tensor

from snugfit.tiling.transport import Transport


def send_text(text: str, transport: Transport) -> None:
    """Tell all others."""
    _send(text.encode(), transport)


def receive_text(transport: Transport) -> str:
    """Wait for what the gateway tells."""
    return _receive(transport).decode()


def send_tensors(tensors: dict[str, Tensor], transport: Transport) -> None:
    """Send tensors by name to all others."""
    if transport.size > 1 and not any(tensor.is_meta for tensor in tensors.values()):
        _send(save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}), transport)


def receive_tensors(transport: Transport) -> dict[str, Tensor]:
    """Wait for the gateway's tensors."""
    return load(_receive(transport))


def _send(content: bytes, transport: Transport) -> None:
    transport.order(torch.tensor([len(content)], dtype=torch.int64))
    if content:
        transport.order(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _receive(transport: Transport) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    transport.order(size)
    flat = torch.empty(int(size), dtype=torch.uint8)
    if len(flat):
        transport.order(flat)
    return bytes(flat.numpy())
