"""Freed memory that the heap keeps between two steps, as far as a predicted peak has room for it.

Memory that goes back to the system has to be mapped again, page by page, for the next tensor, which takes a large part
of a step. Freed memory in the heap has holes that not every tensor fits into, so peaks grow with what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from snugfit.memory.process import MMAP_THRESHOLD_BYTES, set_thresholds, trim_heap

_MIB = 2**20
KEEP_ALL_BYTES = 2**30
SETTLED_STEPS = 2
"""Steps after which a peak shows what a threshold takes."""
FULL_SHARE = 0.95
"""Share of the allowed peak above which nothing is kept any more."""


class Level(NamedTuple):
    """What is kept: freed blocks of less than ``threshold_bytes``, which are not mapped by themselves.

    ``growth`` is more than the factor by which peaks of training steps were seen to grow over the level before. Most of
    a small network's feature maps may come at one level: accumulating 11 images with recomputation, ResNet-20 grew by
    1.25 at 256 KiB and by 1.14 at 512.
    """

    threshold_bytes: int
    growth: float


LEVELS = (
    Level(MMAP_THRESHOLD_BYTES, 1.0),
    Level(2 * MMAP_THRESHOLD_BYTES, 1.3),
    Level(4 * MMAP_THRESHOLD_BYTES, 1.3),
    Level(8 * MMAP_THRESHOLD_BYTES, 1.3),
    Level(_MIB, 1.3),
    Level(2 * _MIB, 1.27),
    Level(8 * _MIB, 1.25),
    Level(32 * _MIB, 1.2),
)


class FreedMemory:
    """Chooses, after each step, how much freed memory the heap keeps.

    A phase begins with none. Every other step more is kept, as long as the peak that this may lead to is allowed. If
    the peak comes close to what is allowed nevertheless, nothing is kept for the rest of the phase.
    """

    def __init__(self) -> None:
        self._allowed_bytes, self._level, self._steps, self._most_bytes = 0, 0, 0, 0
        self._active = self._settled = False

    def begin(self, allowed_bytes: int) -> None:
        """Begin a phase whose peak is to stay below ``allowed_bytes``; 0 keeps nothing."""
        self._allowed_bytes, self._level, self._steps, self._most_bytes = allowed_bytes, 0, 0, 0
        self._settled = False

    @property
    def keeps(self) -> bool:
        """Whether the heap is keeping freed memory now, so that it should not be trimmed."""
        return self._active and self._level > 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context of training steps; afterwards everything that is free goes back to the system."""
        self._active = True
        self._apply()
        try:
            yield
        finally:
            if self._level:
                set_thresholds(LEVELS[0].threshold_bytes)
                trim_heap()
            self._active = False

    def after_step(self, peak_bytes: int) -> None:
        """Keep more or less, given the largest peak since the phase began."""
        self._steps += 1
        self._most_bytes = max(peak_bytes, self._most_bytes)
        if self._level and peak_bytes > FULL_SHARE * self._allowed_bytes:
            self._level, self._settled = 0, True
            self._apply()
            trim_heap()
        elif self._steps % SETTLED_STEPS == 0 and not self._settled:
            self._keep_more()

    def _keep_more(self) -> None:
        following = self._level + 1
        if following == len(LEVELS) or self._most_bytes * LEVELS[following].growth >= self._allowed_bytes:
            self._settled = True
            return
        self._level = following
        self._apply()

    def _apply(self) -> None:
        set_thresholds(LEVELS[self._level].threshold_bytes, KEEP_ALL_BYTES if self._level else None)
