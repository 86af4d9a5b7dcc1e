"""All-reduce of gradients of weights, and moments of whole feature maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from snugfit.tiling.statistics import mean_and_variance
from snugfit.tiling.transport import Handle, Transport

BUCKET_BYTES = 2_000_000


def all_reduce(tensors: Sequence[Tensor], transport: Transport) -> None:
    """Add up tensors of any shapes over processes, in place, in few messages."""
    if transport.size > 1:
        for some in buckets(tensors):
            with flattened(some) as flat:
                transport.all_reduce(flat)


class OverlappedAllReduce:
    """All-reduce of tensors that become ready one after another, overlapped with other work.

    Args:
        transport: to the other processes, all of which add the same tensors in the same order.
    """

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
        self._under_way.append((message, self._transport.begin_all_reduce(message.__enter__())))
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


def all_moments(
    parts: Sequence[Tensor], counts: Sequence[int], like: Tensor, transport: Transport
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel of parts that all processes hold together.

    Means and sums of squares of parts are combined pairwise (Chan, Golub and LeVeque 1979), because differences of
    plain sums lose digits.

    Args:
        parts: of this process, (B, C, h, w); some may be empty.
        counts: values per channel on each process.
        like: an example tensor (C,) with the type and device of the moments.
        transport: to the other processes.

    Returns:
        Mean and variance, (C,).
    """
    own, count = torch.stack([torch.zeros_like(like), torch.zeros_like(like)]), 0
    for part in parts:
        size = part.numel() // len(like)
        if size:
            own, count = _combined(own, count, _sums_of(part, size), size), count + size
    total, count = own, counts[transport.rank] if transport.size == 1 else 0
    if transport.size > 1:
        for other, size in zip(transport.gather(own).wait(), counts, strict=True):
            if size:
                total, count = (_combined(total, count, other, size) if count else other), count + size
    return total[0], total[1] / count


def _sums_of(part: Tensor, size: int) -> Tensor:
    """Mean and sum of squared differences, (2, C), of a part (B, C, h, w) with ``size`` values per channel."""
    mean, variance = mean_and_variance(part)
    return torch.stack([mean, variance * size])


def _combined(first: Tensor, count: int, second: Tensor, more: int) -> Tensor:
    """Mean and sum of squared differences, (2, C), of the union of two sets of values, from those of each, (2, C)."""
    if not count:
        return second
    apart, share = second[0] - first[0], more / (count + more)
    return torch.stack([first[0] + apart * share, first[1] + second[1] + apart * apart * (count * share)])
