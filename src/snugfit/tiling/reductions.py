"""Sums over all processes: gradients of weights, and moments of whole maps (NOTES, Tiled training 4 and 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snugfit.tiling.transport import Transport


def all_sum(tensors: Sequence[Tensor], transport: Transport) -> None:
    """Add up tensors over processes, in place, in one message."""
    if not tensors or transport.size == 1:
        return
    if len(tensors) == 1:
        transport.all_sum(tensors[0])
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    transport.all_sum(flat)
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def all_moments(parts: Sequence[Tensor], channels: int, like: Tensor, transport: Transport) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel, of parts that all processes hold together.

    Means and sums of squares of parts are combined pairwise (Chan, Golub and LeVeque 1979), because a difference of
    plain sums loses digits.

    Args:
        parts: of this process, (B, C, h, w); any of them may be empty.
        channels: C.
        like: a tensor with the type and device of the map.
        transport: to the other processes.

    Returns:
        Mean and variance, (C,).
    """
    own = torch.zeros(2 * channels + 1, dtype=like.dtype, device=like.device)
    for part in parts:
        if part.numel():
            variance, mean = torch.var_mean(part, (0, 2, 3), correction=0)
            count = part.numel() // channels
            own = _combined(own, torch.cat([mean.new_tensor([count]), mean, variance * count]))
    total = own
    if transport.size > 1:
        everyone = transport.all_gather(own)
        total = everyone[0]
        for other in everyone[1:]:
            total = _combined(total, other)
    mean, squares = total[1:].view(2, channels)
    return mean, squares / total[0]


def _combined(first: Tensor, second: Tensor) -> Tensor:
    """Count, means and sums of squared differences of two sets of values, of those of each."""
    counts = first[0] + second[0]
    if float(counts) == 0:
        return first
    share = second[0] / counts
    (mean, squares), (other, more) = first[1:].view(2, -1), second[1:].view(2, -1)
    apart = other - mean
    merged = [mean + apart * share, squares + more + apart * apart * first[0] * share]
    return torch.cat([counts[None], *merged])
