"""Which rows of a feature map an interval of another needs and reaches: exact interval arithmetic in one dimension.

Equations 4.1 to 4.4 of Rama and Gerstlauer (UT-CERC-24-02) are special cases, for odd kernels, padding K // 2 and
dilation 1; 4.1 fetches S - 1 rows more than a convolution of stride S reads.

Rows are numbered from 0, and intervals are half open. Neither direction clips: rows outside the feature map are
padding, and :meth:`Interval.clip` removes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, order=True)
class Interval:
    """Rows (or columns) ``start``, ..., ``stop - 1``; empty where ``stop`` is not above ``start``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(self.stop - self.start, 0)

    @classmethod
    def whole(cls, size: int) -> Interval:
        """All rows of a feature map."""
        return cls(0, size)

    def clip(self, size: int) -> Interval:
        """The part inside a feature map of ``size`` rows."""
        return self & Interval(0, size)

    def __and__(self, other: Interval) -> Interval:
        """The rows in both; every empty result equals :data:`EMPTY`."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else EMPTY

    def hull(self, other: Interval) -> Interval:
        """The smallest interval that holds both."""
        if not self or not other:
            return self if self else other
        return Interval(min(self.start, other.start), max(self.stop, other.stop))

    def __contains__(self, other: object) -> bool:
        """Whether another interval lies within this one; an empty one always does."""
        if not isinstance(other, Interval):
            return False
        return not other or (self.start <= other.start and other.stop <= self.stop)

    def around(self, part: Interval) -> int:
        """The number of rows that can be removed from both ends without touching ``part``; 0 if that is empty."""
        return max(min(part.start - self.start, self.stop - part.stop), 0) if part else 0

    def without(self, rows: int) -> Interval:
        """The interval without that many rows at each end."""
        return Interval(self.start + rows, self.stop - rows)

    def within(self, other: Interval) -> slice:
        """Its slice in a tensor that holds the rows of ``other``."""
        return slice(self.start - other.start, self.stop - other.start) if self else slice(0, 0)


EMPTY = Interval(0, 0)


@dataclass(frozen=True)
class Window:
    """How a layer reads rows: convolution or pooling in one dimension; row by row by default.

    Attributes:
        kernel: rows that an output reads.
        stride: rows between the first rows that two neighbouring outputs read.
        before, after: rows of padding at either end of the feature map.
        dilation: distance between two rows that an output reads.
    """

    kernel: int = 1
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Number of rows from the first to the last that an output reads."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, size: int) -> int:
        """Number of output rows for a feature map of ``size`` rows."""
        return max((size + self.before + self.after - self.reach) // self.stride + 1, 0)

    def needs(self, outputs: Interval) -> Interval:
        """The input rows that these outputs read, from the first to the last (equations 4.1 and 4.2)."""
        if not outputs:
            return EMPTY
        first = outputs.start * self.stride - self.before
        return Interval(first, (outputs.stop - 1) * self.stride - self.before + self.reach)

    def reaches(self, inputs: Interval) -> Interval:
        """The outputs that read any of these rows, from the first to the last (equations 4.3 and 4.4).

        With dilation, or a stride beyond the reach, some in between, or all, may read none of them.
        """
        if not inputs:
            return EMPTY
        first = -((self.reach - 1 - inputs.start - self.before) // self.stride)  # rounded up
        last = (inputs.stop - 1 + self.before) // self.stride
        return Interval(first, last + 1) if first <= last else EMPTY

    def inside(self, inputs: Interval, size: int) -> Interval:
        """The outputs that read no rows of the feature map, of ``size`` rows, other than these."""
        if not inputs:
            return EMPTY
        first = -((-inputs.start - self.before) // self.stride) if inputs.start > 0 else 0  # rounded up
        last = (inputs.stop + self.before - self.reach) // self.stride
        stop = last + 1 if inputs.stop < size else self.outputs(size)
        return Interval(first, stop) if first < stop else EMPTY


SAME = Window()
"""Row by row: norms, activations, additions."""


def balanced(size: int, parts: int) -> tuple[Interval, ...]:
    """Cut rows into parts that differ by at most one row; some are empty if there are more parts than rows."""
    return weighted(size, (1.0,) * parts)


def weighted(size: int, weights: tuple[float, ...]) -> tuple[Interval, ...]:
    """Cut rows into parts in proportion to weights, such as the speed of devices: each cut within half a row.

    Raises:
        ValueError: there is no weight, or one is not above 0.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights of tiles must be above 0, not {weights}.")
    total, sums = sum(weights), [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    cuts = [int(size * each / total + 0.5) for each in sums]
    return tuple(Interval(start, stop) for start, stop in pairwise(cuts))


def scaled_up(parts: tuple[Interval, ...], window: Window, size: int) -> tuple[Interval, ...]:
    """Parts of a layer's input, of ``size`` rows, that belong to parts of its output, in order and without gaps.

    Every cut is multiplied by the stride.
    """
    cuts = [0, *(min(part.start * window.stride, size) for part in parts[1:]), size]
    return tuple(Interval(start, stop) for start, stop in pairwise(cuts))
