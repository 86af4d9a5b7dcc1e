"""Tensor bytes of a probe's step, computed without allocating them, as rarely as possible.

A step on the meta device takes up to a second for a deep network.
"""

from __future__ import annotations

from collections.abc import Callable

from snugfit.memory import MemoryLimit

META_PASS_BYTES = 64_000_000
"""Address space for running a network on the meta device, whose graph's code may be compiled.

Python may crash if it is refused memory for that, and the smallest possible budget must be reported for any budget. The
memory that is really used counts as usual.
"""


def smallest_floor(look: Callable[[int], int]) -> tuple[int, int]:
    """Fewest samples that a probe can train on, and its tensor bytes at them."""
    try:
        return 1, look(1)
    except ValueError:  # torch's BatchNorm refuses a single value per channel
        return 2, look(2)


class Floors:
    """Known floors of a probe, by batch size.

    Args:
        look: the probe's ``floor``.
        limit: the memory budget, in force.
        known: floors that are already known.
    """

    def __init__(self, look: Callable[[int], int], limit: MemoryLimit, known: dict[int, int] | None = None) -> None:
        self._look, self._limit = look, limit
        self.known = dict(known or {})

    def at(self, batch: int) -> int:
        """Tensor bytes at a batch size."""
        if batch not in self.known:
            with self._limit.allow_address_space(META_PASS_BYTES):
                self.known[batch] = self._look(batch)
        return self.known[batch]

    def smallest(self) -> tuple[int, int]:
        """Fewest samples that the probe can train on, and its tensor bytes at them."""
        if 1 not in self.known and 2 in self.known:
            return 2, self.known[2]  # it was looked at before
        return smallest_floor(self.at)

    def below(self, batch: int, most: int) -> int:
        """Upper bound on tensor bytes at a batch size: a line between those of the smallest and the largest batch.

        A step's peak is the largest of many amounts that grow linearly with the batch, so no size in between needs more
        than the line.
        """
        fewest, least = self.smallest()
        if batch <= fewest or most <= fewest or batch >= most:
            return self.at(max(batch, fewest))
        return least + -(-(self.at(most) - least) * (batch - fewest) // (most - fewest))
