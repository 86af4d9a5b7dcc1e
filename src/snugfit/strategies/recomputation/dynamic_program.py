"""The dynamic program that finds the fastest recomputation schedule within a memory limit. Arithmetic, no torch.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory" (2019, arXiv:1911.13214), section 4. C[s, t, m] is the least time to run units s to
t forward and backward in m slots of memory, in addition to the input of s, which is in memory already. Either unit s
saves what its backward pass needs (their F_all); or only its input is kept (F_ck), the units up to some s' run without
saving anything (F_none), and s to s' - 1 are solved again once the backward pass has reached s':

    C[s, t, m] = min(f_s + C[s + 1, t, m - saved_s] + b_s,
                     min over s' of  f_s + ... + f_(s'-1) + C[s', t, m - output_(s'-1)] + C[s, s' - 1, m])

where each operation also requires enough memory for its own peak. The result is exact over all schedules that keep a
feature map from its first checkpoint to its last use (the paper's memory-persistent schedules); others may, rarely, be
faster. Unlike in the paper, running on without saving requires memory for the units up to s' only, not up to t.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import numpy as np

from snugfit.strategies.recomputation.schedule import Schedule

SLOTS = 400
"""Number of slots of a memory limit. A schedule that keeps 20 feature maps is overestimated by 2 % on average."""

PAGE_FILE_BYTES = 1 << 21
"""Memory of a page file, for any schedule that pages."""


@dataclass(frozen=True)
class UnitCost:
    """The cost of running a unit. Bytes leave out its input and all weights, which are in memory anyway.

    Attributes:
        forward_seconds, backward_seconds: time of each pass.
        output_bytes: of its output, and of the gradient with respect to it.
        saved_bytes: saved for its backward pass, with its output, without its input.
        discarding_peak: peak of a forward pass that saves nothing, with the output.
        saving_peak: peak of a forward pass that saves all.
        backward_peak: peak of the backward pass, with the saved tensors and both gradients.
        paged_bytes: of what it saves that can be paged, its input included.
        paged_kept_bytes, paged_saving_peak, paged_backward_peak: the same as without ``paged``, if these are paged;
            the kept bytes without the output.
        paging_speed: bytes per second that are written, or read.
    """

    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    saved_bytes: int
    discarding_peak: int
    saving_peak: int
    backward_peak: int
    paged_bytes: int = 0
    paged_kept_bytes: int = 0
    paged_saving_peak: int = 0
    paged_backward_peak: int = 0
    paging_speed: float = math.inf

    @property
    def paged_seconds(self) -> float:
        """Seconds of both passes if what it saves is paged, which is written and read while the unit runs."""
        moved = self.paged_bytes / self.paging_speed
        return max(self.forward_seconds, moved) + max(self.backward_seconds, moved)

    @property
    def output_paging_seconds(self) -> float:
        """Seconds to page its output and to read it."""
        return 2 * self.output_bytes / self.paging_speed


def schedule_cost(schedule: Schedule, costs: Sequence[UnitCost]) -> tuple[float, int]:
    """Seconds of a step by this schedule, and its peak bytes without the first unit's input."""
    if schedule.paged:
        return _paged_cost(schedule, costs)
    held, peak, seconds = 0, 0, sum(costs[unit].backward_seconds for unit in schedule.units)
    gradient = costs[list(schedule.units)[-1]].output_bytes
    for part in schedule.parts:
        units = list(part.units) if isinstance(part, Schedule) else [part]
        seconds += sum(costs[unit].forward_seconds for unit in units)
        if isinstance(part, Schedule):
            peak = max(peak, held + gradient + _discarding_peak(units, costs))
            held += costs[units[-1]].output_bytes
        else:
            peak = max(peak, held + gradient + costs[part].saving_peak)
            held += costs[part].saved_bytes
    for part in reversed(schedule.parts):
        if isinstance(part, Schedule):
            held -= costs[list(part.units)[-1]].output_bytes
            again, part_peak = schedule_cost(part, costs)
            seconds += again - sum(costs[unit].backward_seconds for unit in part.units)
        else:
            held -= costs[part].saved_bytes
            part_peak = costs[part].backward_peak
        peak = max(peak, held + part_peak)
    return seconds, peak


def _paged_cost(schedule: Schedule, costs: Sequence[UnitCost]) -> tuple[float, int]:
    """The same for a schedule that keeps on disk what its first parts keep."""
    gradient = costs[list(schedule.units)[-1]].output_bytes
    held, peak, seconds = 0, 0, 0.0
    for part in (*schedule.parts[: schedule.paged], Schedule(schedule.parts[schedule.paged :])):
        units = list(part.units) if isinstance(part, Schedule) else [part]
        entry = costs[units[0] - 1].output_bytes if units and units[0] else 0
        if not isinstance(part, Schedule):
            cost = costs[part]
            peak = max(peak, held + entry + gradient + cost.paged_saving_peak, held + cost.paged_backward_peak)
            held += cost.paged_kept_bytes
            seconds += cost.paged_seconds
        elif units:
            again, part_peak = schedule_cost(part, costs)
            peak, seconds = max(peak, held + entry + part_peak), seconds + again
            if units[-1] + 1 < len(costs):
                peak = max(peak, held + entry + gradient + _discarding_peak(units, costs))
                seconds += sum(costs[unit].forward_seconds for unit in units)
                seconds += costs[units[0] - 1].output_paging_seconds if units[0] else 0.0
    return seconds, peak + PAGE_FILE_BYTES


def _discarding_peak(units: Sequence[int], costs: Sequence[UnitCost]) -> int:
    """Peak bytes of a forward pass of consecutive units that saves nothing, without the first one's input."""
    inputs = [0, *(costs[unit].output_bytes for unit in units)]
    return max(size + costs[unit].discarding_peak for size, unit in zip(inputs, units, strict=False))


class DynamicProgram:
    """The fastest schedules for each memory size up to a limit, in bytes without the first unit's input.

    Bytes are rounded up to whole slots of the limit, so that memory is never underestimated. If the limit is not larger
    than the number of slots, a slot is a byte and the result exact.

    Attributes:
        seconds: least seconds of a step in 0, 1, ... slots, (slots + 1,); infinite where there is no schedule.
        slot: bytes of a slot.
    """

    def __init__(self, costs: Sequence[UnitCost], limit: int, slots: int = SLOTS) -> None:
        self.slot = max(limit / slots, 1.0)
        self._slots, self._count = int(limit / self.slot), len(costs)
        column = {field.name: np.array([getattr(cost, field.name) for cost in costs]) for field in fields(UnitCost)}
        self._backward_seconds = column["backward_seconds"]
        self._elapsed = np.concatenate([[0.0], np.cumsum(column["forward_seconds"])])
        self._output, self._saved, self._saving_peak, self._backward_peak, discarding = (
            self._in_slots(column[name])
            for name in ("output_bytes", "saved_bytes", "saving_peak", "backward_peak", "discarding_peak")
        )
        running = discarding + np.concatenate([[0], self._output[:-1]])
        self._discarding_peak = [  # of s and e: slots to run units s to e without saving anything
            [0] * s + list(accumulate([discarding[s], *running[s + 1 :]], max)) for s in range(self._count)
        ]
        shape = (self._count, self._count, self._slots + 1)
        self._best: Any = np.full(shape, np.inf)  # C[s, t, m]
        self._later: Any = np.full(shape, np.inf)  # by t and s: C[s, t, m - output of s - 1]
        for length in range(self._count):
            for s in range(self._count - length):
                self._solve(s, s + length)
        self.seconds: Any = self._best[0, self._count - 1]

    def _in_slots(self, sizes: Any) -> Any:
        return np.ceil(sizes / self.slot).astype(np.int64)

    def _solve(self, s: int, t: int) -> None:
        best = self._saving(s, t, slice(None))
        if t > s:
            np.minimum(best, self._recomputing(s, t, slice(None)).min(axis=0), out=best)
        self._best[s, t] = best
        if s > 0:
            self._later[t, s] = shifted(best, self._output[s - 1])

    def _saving(self, s: int, t: int, slots: slice) -> Any:
        """Seconds if unit s saves what its backward pass needs, by slots: (slots,)."""
        rest = np.zeros(self._slots + 1) if s == t else shifted(self._best[s + 1, t], self._saved[s])
        seconds = rest + (self._elapsed[s + 1] - self._elapsed[s] + self._backward_seconds[s])
        seconds[: max(self._output[t] + self._saving_peak[s], self._backward_peak[s])] = np.inf
        return seconds[slots]

    def _recomputing(self, s: int, t: int, slots: slice) -> Any:
        """Seconds if units s to s' - 1 are recomputed from the input of s, for s' from s + 1 on: (t - s, slots)."""
        once = self._elapsed[s + 1 : t + 1] - self._elapsed[s]
        seconds = self._best[s, s:t, slots] + self._later[t, s + 1 : t + 1, slots]
        seconds += once[:, None]
        needed = np.array(self._discarding_peak[s][s:t]) + self._output[t]
        seconds[np.arange(self._slots + 1)[slots] < needed[:, None]] = np.inf
        return seconds

    def schedule(self, slots: int) -> Schedule:
        """The fastest schedule in a number of slots.

        Raises:
            ValueError: there is none.
        """
        if not np.isfinite(self.seconds[slots]):
            raise ValueError(f"no schedule fits {slots} slots of {self.slot:.0f} bytes")
        return Schedule(tuple(self._parts(0, self._count - 1, slots)))

    def _parts(self, s: int, t: int, m: int) -> Iterator[int | Schedule]:
        while s < t:
            at = slice(m, m + 1)
            options = self._recomputing(s, t, at)[:, 0]
            cut = s + 1 + int(options.argmin())
            if self._saving(s, t, at)[0] <= options.min():
                yield s
                m -= int(self._saved[s])
                s += 1
            else:
                yield Schedule(tuple(self._parts(s, cut - 1, m)))
                m -= int(self._output[cut - 1])
                s = cut
        yield s

    def frontier(self) -> list[Schedule]:
        """Every schedule that is faster than all with less memory, the fastest (and largest) last."""
        finite = np.flatnonzero(np.isfinite(self.seconds))
        if not len(finite):
            return []
        faster = [finite[0], *(m for m in finite[1:] if self.seconds[m] < self.seconds[m - 1] * (1 - 1e-9))]
        return [self.schedule(int(m)) for m in faster]


def shifted(values: Any, by: int) -> Any:
    """``values[m - by]`` at m, infinite where there is none; both (slots,)."""
    moved = np.full_like(values, np.inf)
    if by < len(values):
        moved[by:] = values[: len(values) - by]
    return moved


class PagingProgram(DynamicProgram):
    """The fastest schedules, with paging, for each memory size up to a limit.

    The first parts are the ones to page: the backward pass reaches them last, which leaves most time to write and to
    read, and their feature maps are the largest. P[s, m] is the least time of units s to the last in m slots of memory,
    which include the input of s, but not the file's memory. With the table C of :class:`DynamicProgram` for what is in
    memory:

        P[s, m] = min(C[s, last, m - input_s],
                      f_s + b_s + disk_s + P[s + 1, m - kept_s],
                      min over e of  disk(input_s) + f_s + ... + f_e + C[s, e, m - input_s] + P[e + 1, m])

    The second option pages what unit s saves, except the small tensors ``kept_s``. The third runs s to e again from an
    input that is read from disk. Each requires enough memory for its own peak. A stretch that runs again pages nothing.
    """

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
        self._file = int(self._in_slots(np.array(PAGE_FILE_BYTES)))
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
