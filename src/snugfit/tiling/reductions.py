"""Sums over all processes: gradients of weights, and moments of whole maps (NOTES, Tiled training 4 and 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def all_sum(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Add up tensors over processes, in place, in one message."""
    if not tensors or dist.get_world_size(group) == 1:
        return
    if len(tensors) == 1:
        dist.all_reduce(tensors[0], group=group)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def all_moments(
    parts: Sequence[Tensor], channels: int, like: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel, of parts that all processes hold together.

    Means and sums of squares of parts are combined pairwise (Chan, Golub and LeVeque 1979), because a difference of
    plain sums loses digits.

    Args:
        parts: of this process, (B, C, h, w); any of them may be empty.
        channels: C.
        like: a tensor with the type and device of the map.
        group: the processes; all by default.

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
    if dist.get_world_size(group) > 1:
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, own, group=group)
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
