"""The dynamic programme that finds the fastest recomputation schedule within a memory limit. Arithmetic, no torch.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory" (2019, arXiv:1911.13214), section 4. C[s, t, m] is the least time to run units s to
t forward and backward in m slots of memory, beside which the input of s lies in memory already. Either unit s keeps
what its backward pass needs (their F_all), or only its input is kept (F_ck), the units up to some s' run on without
keeping anything (F_none), and s to s' - 1 are solved anew once the backward pass has come down to s':

    C[s, t, m] = min(f_s + C[s + 1, t, m - saved_s] + b_s,
                     min over s' of  f_s + ... + f_(s'-1) + C[s', t, m - output_(s'-1)] + C[s, s' - 1, m])

where every operation must also have headroom for what it takes while it runs. This is exact over all schedules that
keep a feature map from when they first decide to until its last use (the paper's memory-persistent ones); others may,
rarely, be faster. Unlike the paper, the headroom for continuing is required for the units up to s' alone, not up to t.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import numpy as np

from snugfit.strategies.checkpoint.schedule import Schedule

SLOTS = 400
"""Into which a memory limit is divided: a schedule of 20 kept maps is over-estimated by 2 % on average."""


@dataclass(frozen=True)
class Stage:
    """What running a unit takes; bytes beside its input and all weights, which are in memory anyway.

    Attributes:
        forward, backward: seconds.
        output: bytes of its output; of the gradient that comes back, too.
        saved: bytes that it keeps for its backward pass, its input left out and its output included.
        passing: most bytes alive in a forward pass that keeps nothing; the output is among them.
        saving: most bytes alive in a forward pass that keeps all.
        returning: most bytes alive in the backward pass; what was saved and both gradients are among them.
    """

    forward: float
    backward: float
    output: int
    saved: int
    passing: int
    saving: int
    returning: int


def price(schedule: Schedule, stages: Sequence[Stage]) -> tuple[float, int]:
    """Seconds of a step by this schedule, and the most bytes alive at once, the first unit's input left out."""
    held, most, seconds = 0, 0, sum(stages[unit].backward for unit in schedule.units)
    gradient = stages[list(schedule.units)[-1]].output
    for part in schedule.parts:
        units = list(part.units) if isinstance(part, Schedule) else [part]
        seconds += sum(stages[unit].forward for unit in units)
        if isinstance(part, Schedule):
            given = [0, *(stages[unit].output for unit in units)]
            most = max(most, held + gradient + max(a + stages[u].passing for a, u in zip(given, units, strict=False)))
            held += stages[units[-1]].output
        else:
            most = max(most, held + gradient + stages[part].saving)
            held += stages[part].saved
    for part in reversed(schedule.parts):
        if isinstance(part, Schedule):
            held -= stages[list(part.units)[-1]].output
            again, peak = price(part, stages)
            seconds += again - sum(stages[unit].backward for unit in part.units)
        else:
            held -= stages[part].saved
            peak = stages[part].returning
        most = max(most, held + peak)
    return seconds, most


class Programme:
    """All schedules that are worth considering within a memory limit.

    Args:
        stages: of every unit, in chain order.
        limit: bytes, the first unit's input left out.
        slots: into which the limit is divided; bytes are rounded up to whole slots, so that nothing takes more than it
            is said to. Where the limit is not larger, a slot is a byte and the programme exact.

    Attributes:
        seconds: least seconds of a step in 0, 1, ... slots, (slots + 1,); infinite where there is no schedule.
        slot: bytes of a slot.
    """

    def __init__(self, stages: Sequence[Stage], limit: int, slots: int = SLOTS) -> None:
        self.slot = max(limit / slots, 1.0)
        self._slots, self._count = int(limit / self.slot), len(stages)
        of = {field.name: np.array([getattr(stage, field.name) for stage in stages]) for field in fields(Stage)}
        self._backward, self._output = of["backward"], self._rounded(of["output"])
        self._saved, self._returning = self._rounded(of["saved"]), self._rounded(of["returning"])
        self._saving = self._rounded(of["saving"])
        self._elapsed = np.concatenate([[0.0], np.cumsum(of["forward"])])
        given = np.concatenate([[0], self._output[:-1]])
        passing = self._rounded(of["passing"])
        self._passing = [  # of s and e: slots to run units s to e without keeping anything
            [0] * s + list(accumulate([passing[s], *(given + passing)[s + 1 :]], max)) for s in range(self._count)
        ]
        shape = (self._count, self._count, self._slots + 1)
        self._best: Any = np.full(shape, np.inf)  # C[s, t, m]
        self._later: Any = np.full(shape, np.inf)  # by t and s: C[s, t, m - output of s - 1]
        for length in range(self._count):
            for s in range(self._count - length):
                self._solve(s, s + length)
        self.seconds: Any = self._best[0, self._count - 1]

    def _rounded(self, sizes: Any) -> Any:
        return np.ceil(sizes / self.slot).astype(np.int64)

    def _solve(self, s: int, t: int) -> None:
        best = self._keeping(s, t, slice(None))
        if t > s:
            np.minimum(best, self._running_on(s, t, slice(None)).min(axis=0), out=best)
        self._best[s, t] = best
        if s > 0:
            self._later[t, s] = _shifted(best, self._output[s - 1])

    def _keeping(self, s: int, t: int, slots: slice) -> Any:
        """Seconds where unit s keeps what it saves, by slots."""
        rest = np.zeros(self._slots + 1) if s == t else _shifted(self._best[s + 1, t], self._saved[s])
        seconds = rest + (self._elapsed[s + 1] - self._elapsed[s] + self._backward[s])
        seconds[: max(self._output[t] + self._saving[s], self._returning[s])] = np.inf
        return seconds[slots]

    def _running_on(self, s: int, t: int, slots: slice) -> Any:
        """Seconds where units s to s' - 1 keep nothing but the first one's input, (t - s, slots), for s' from s + 1."""
        once = self._elapsed[s + 1 : t + 1] - self._elapsed[s]
        seconds = self._best[s, s:t, slots] + self._later[t, s + 1 : t + 1, slots]
        seconds += once[:, None]
        needed = np.array(self._passing[s][s:t]) + self._output[t]
        seconds[np.arange(self._slots + 1)[slots] < needed[:, None]] = np.inf
        return seconds

    def schedule(self, slots: int) -> Schedule:
        """The fastest schedule in so many slots.

        Raises:
            ValueError: there is none.
        """
        if not np.isfinite(self.seconds[slots]):
            raise ValueError(f"no schedule fits {slots} slots of {self.slot:.0f} bytes")
        return Schedule(tuple(self._parts(0, self._count - 1, slots)))

    def _parts(self, s: int, t: int, m: int) -> Iterator[int | Schedule]:
        while s < t:
            at = slice(m, m + 1)
            options = self._running_on(s, t, at)[:, 0]
            cut = s + 1 + int(options.argmin())
            if self._keeping(s, t, at)[0] <= options.min():
                yield s
                m -= int(self._saved[s])
                s += 1
            else:
                yield Schedule(tuple(self._parts(s, cut - 1, m)))
                m -= int(self._output[cut - 1])
                s = cut
        yield s

    def frontier(self) -> list[Schedule]:
        """Every schedule that is faster than those in less memory, the fastest (and largest) last."""
        finite = np.flatnonzero(np.isfinite(self.seconds))
        if not len(finite):
            return []
        faster = [finite[0], *(m for m in finite[1:] if self.seconds[m] < self.seconds[m - 1] * (1 - 1e-9))]
        return [self.schedule(int(m)) for m in faster]


def _shifted(values: Any, by: int) -> Any:
    """``values[m - by]`` at m; infinite where there is none."""
    moved = np.full_like(values, np.inf)
    if by < len(values):
        moved[by:] = values[: len(values) - by]
    return moved
