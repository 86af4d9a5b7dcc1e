"""The fastest schedules that keep on disk what the first parts keep, and in memory what the others keep.

The first parts are the ones to page: the backward pass reaches them last, which leaves most time to write and to read,
and their feature maps are the largest. P[s, m] is the least time of units s to the last in m slots of memory, which
include the input of s, but not the file's memory. With the table C of :class:`DynamicProgram` for what is in memory:

    P[s, m] = min(C[s, last, m - input_s],
                  f_s + b_s + disk_s + P[s + 1, m - kept_s],
                  min over e of  disk(input_s) + f_s + ... + f_e + C[s, e, m - input_s] + P[e + 1, m])

The second option pages what unit s saves, except the small tensors ``kept_s``. The third runs s to e again from an
input that is read from disk. Each requires enough memory for its own peak. A stretch that runs again pages nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from snugfit.strategies.recomputation import dynamic_program
from snugfit.strategies.recomputation.dynamic_program import SLOTS, DynamicProgram, UnitCost, schedule_cost, shifted
from snugfit.strategies.recomputation.schedule import Schedule


class PagingProgram(DynamicProgram):
    """The fastest schedules, with paging, for each memory size up to a limit."""

    def __init__(self, costs: Sequence[UnitCost], limit: int, slots: int = SLOTS) -> None:
        super().__init__(costs, limit, slots)
        self._costs = costs
        self._kept, self._paged_saving, self._paged_backward = (
            self._in_slots(np.array([getattr(cost, name) for cost in costs]))
            for name in ("paged_kept_bytes", "paged_saving_peak", "paged_backward_peak")
        )
        self._paging: Any = np.zeros((self._count + 1, self._slots + 1))  # P[s, m]
        for s in reversed(range(self._count)):
            self._paging[s] = self._options(s).min(axis=0)
        self._file = int(self._in_slots(np.array(dynamic_program.PAGE_FILE_BYTES)))
        self.seconds = np.minimum(self._best[0, self._count - 1], shifted(self._paging[0], self._file))

    def _options(self, s: int) -> Any:
        """Seconds if all from s on stays in memory, if s pages, and if s to e run again from disk: (.., slots + 1)."""
        entry, last, cost = self._entry(s), self._count - 1, self._costs[s]
        paged = shifted(self._paging[s + 1], int(self._kept[s])) + cost.paged_seconds
        paged[: max(entry + self._output[last] + self._paged_saving[s], self._paged_backward[s])] = np.inf
        found = [shifted(self._best[s, last], entry), paged]
        reading = self._costs[s - 1].output_paging_seconds if s else 0.0
        for e in range(s, last):
            seconds = shifted(self._best[s, e], entry) + self._paging[e + 1]
            seconds += self._elapsed[e + 1] - self._elapsed[s] + reading
            seconds[: entry + self._discarding_peak[s][e - s] + self._output[last]] = np.inf
            found.append(seconds)
        return np.array(found)

    def _entry(self, s: int) -> int:
        """Slots of the input of unit s, except of the first, which is in memory anyway."""
        return int(self._output[s - 1]) if s else 0

    def schedule(self, slots: int) -> Schedule:
        """The fastest schedule in a number of slots, where there is one."""
        if self.seconds[slots] == self._best[0, self._count - 1, slots]:
            return super().schedule(slots)
        parts: list[int | Schedule] = []
        s, slots = 0, slots - self._file
        while s < self._count:
            option, within = int(self._options(s)[:, slots].argmin()), slots - self._entry(s)
            if option == 0:
                return Schedule((*parts, *self._parts(s, self._count - 1, within)), paged=len(parts))
            if option == 1:
                parts.append(s)
                slots -= int(self._kept[s])
                s += 1
            else:
                end = s + option - 2
                parts.append(Schedule(tuple(self._parts(s, end, within))))
                s = end + 1
        return Schedule(tuple(parts), paged=len(parts))


def paged_bytes(schedule: Schedule, costs: Sequence[UnitCost]) -> int:
    """Most bytes on disk in a step by this schedule."""
    moved = 0
    for part in schedule.parts[: schedule.paged]:
        first = next(part.units) if isinstance(part, Schedule) else part
        entry = costs[first - 1].output_bytes if first else 0
        moved += entry if isinstance(part, Schedule) else costs[part].paged_bytes
    return moved


def frontier(costs: Sequence[UnitCost], *, paging: bool = False) -> list[Schedule]:
    """The Pareto-optimal schedules in time and memory, by memory; the last is plain backpropagation.

    The dynamic program runs a second time with a lower limit, whose smaller slots resolve the schedules with the least
    memory.
    """
    program = PagingProgram if paging else DynamicProgram
    plain = Schedule.keeping(len(costs))
    _, most = schedule_cost(plain, costs)
    found = [plain, *program(costs, int(most * (1 + len(costs) / SLOTS)) + 1).frontier()]
    least = min(schedule_cost(schedule, costs)[1] for schedule in found)
    found += program(costs, least).frontier()
    best: list[Schedule] = []
    for schedule in sorted(found, key=lambda each: schedule_cost(each, costs)[::-1]):
        if not best or schedule_cost(schedule, costs)[0] < schedule_cost(best[-1], costs)[0] * (1 - 1e-9):
            best.append(schedule)
    return best
