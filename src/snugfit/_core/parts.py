"""Batches divided into parts of nearly equal size, for micro-batches that accumulate to a batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from snugfit.errors import UsageError


def check_batches(batch_size: int, start_step: int) -> None:
    """Refuse a batch without images, and a step before the first."""
    if batch_size < 1 or start_step < 0:
        raise UsageError(f"a batch size must be at least 1 and a step at least 0, not {batch_size} and {start_step}.")


def part_sizes(images: int, parts: int) -> tuple[int, ...]:
    """Sizes of ``parts`` parts of so many images; they differ by at most one, and the largest come first."""
    size, larger = divmod(images, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def largest_parts(images: int) -> tuple[int, ...]:
    """Sizes that the largest part of so many images can have, ascending: the number of parts follows from each."""
    return tuple(sorted({-(-images // parts) for parts in range(1, images + 1)}))


def epoch_parts(count: int, batch_size: int, parts: int = 1, start_step: int = 0) -> Iterator[slice]:
    """Rows of every part of an epoch's batches, from step ``start_step`` on.

    The last, incomplete batch is dropped, unless it is the only one; that has no larger parts than others have.
    """
    largest = -(-batch_size // parts)
    for first in range(start_step * batch_size, max(count // batch_size, 1) * batch_size, batch_size):
        images = min(batch_size, count - first)
        sizes = part_sizes(images, parts if images == batch_size else max(-(-images // largest), 1))
        for start, size in zip(accumulate(sizes, initial=first), sizes, strict=False):
            yield slice(start, start + size)
