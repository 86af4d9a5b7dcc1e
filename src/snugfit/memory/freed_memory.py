"""Freed memory that the heap keeps between two steps, if a predicted peak has room for it.

Memory that goes back to the system has to be mapped again, page by page, for the next tensor, which takes a large part
of a step. Freed memory in the heap has holes that not every tensor fits into, so peaks grow with what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from snugfit.memory.address_space import KERNEL_BYTES
from snugfit.memory.heap import (
    MMAP_THRESHOLD_BYTES,
    free_held_blocks,
    hold_free_blocks,
    set_thresholds,
    sets_thresholds,
)

KEEP_ALL_BYTES = 2**30
THRESHOLDS = tuple(MMAP_THRESHOLD_BYTES << doublings for doublings in range(10))
"""Freed blocks of fewer bytes are kept, one threshold after another: from nothing to 32 MiB."""
SETTLED_STEPS = 2
"""Steps after which a peak shows what a threshold takes."""
FULL_SHARE = 0.95
"""Share of the allowed peak above which nothing is kept any more."""
GROWTH = 1.7
"""Upper bound of the factor by which a peak grows: 1.0 to 1.2 in most networks. If all feature maps have one size, they
are kept at one threshold: 1.47 in a network of equal convolutions, 1.45 in ResNet-20 with recomputation, and 1.58 in
SmallConv, where one step went from 0.95 of 1.5 times the peak to above it."""
LOOP_GROWTH = 1.9
"""The same in loops whose images are not channels_last: 1.79 in a network of equal convolutions."""
LEFT_SHARE = 0.05
"""Share of a memory budget that is left free."""
FREE_SHARE = 0.5
"""Share of the machine's free memory up to which a peak may grow for speed."""


def kept_peak(peak_bytes: int, budget_bytes: int | None, free_bytes: int, growth: float = GROWTH) -> int:
    """The peak that keeping freed memory may lead to, in a budget and in the machine's free memory.

    It is ``peak_bytes`` where these have no room for so much growth, and where malloc is not glibc's.
    """
    room = int(free_bytes * FREE_SHARE)
    if budget_bytes is not None:
        room = min(room, int(budget_bytes * (1 - LEFT_SHARE)) - KERNEL_BYTES)
    peak = int(peak_bytes * growth)
    return peak if sets_thresholds() and peak <= room else peak_bytes


class FreedMemory:
    """Chooses, after each step, how much freed memory the heap keeps.

    A phase begins with none. Every other step more is kept. If the peak comes close to what is allowed, nothing is kept
    for the rest of the phase.
    """

    def __init__(self) -> None:
        self._allowed_bytes, self._level, self._steps = 0, 0, 0
        self._active, self._settled = False, True

    def begin(self, allowed_bytes: int) -> None:
        """Begin a phase whose peak is to stay below ``allowed_bytes``; 0 keeps nothing."""
        self._allowed_bytes, self._level, self._steps = allowed_bytes, 0, 0
        self._settled = allowed_bytes == 0

    @property
    def keeps(self) -> bool:
        """Whether the heap is keeping freed memory now, so that it should not be trimmed."""
        return self._active and self._level > 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context of training steps, or of passes; afterwards everything that is free goes back to the system."""
        self._active = True
        self._apply()
        try:
            yield
        finally:
            if self._level:
                set_thresholds(THRESHOLDS[0])
                hold_free_blocks()
            self._active = False

    def check(self, peak_bytes: int) -> None:
        """Keep nothing any more if the largest peak since the phase began is close to what is allowed."""
        if self._active and peak_bytes > FULL_SHARE * self._allowed_bytes:
            self.give_up()

    def after_step(self, peak_bytes: int) -> None:
        """Keep more or less, given the largest peak since the phase began; nothing outside of :meth:`kept`."""
        if not self._active:
            return
        self._steps += 1
        self.check(peak_bytes)
        if self._steps % SETTLED_STEPS == 0 and not self._settled:
            self._level += 1
            self._settled = self._level == len(THRESHOLDS) - 1
            self._apply()

    def give_up(self) -> None:
        """Keep nothing for the rest of the phase."""
        kept, self._level, self._settled = self._level, 0, True
        if kept:
            self._apply()
            hold_free_blocks()

    def _apply(self) -> None:
        if self._level:
            free_held_blocks()
        set_thresholds(THRESHOLDS[self._level], KEEP_ALL_BYTES if self._level else None)
