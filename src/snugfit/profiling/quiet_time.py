"""Seconds that a computation takes on a quiet machine, measured on one that other processes may use too."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from snugfit._core.machine_memory import PROC, has_core_quota

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_WAITING = 0.9
"""Largest share of a computation's time that a thread can have waited: a wait that began before it counts whole."""


@dataclass
class Stopwatch:
    """Times what runs inside ``with``, and says how long it would have taken on a quiet machine.

    With several threads a busy core costs far more than its share: at every layer all threads wait for the one that has
    no core. The kernel counts how long each thread waited for one (``/proc/PID/task/TID/schedstat``).

    Attributes:
        passed: seconds by the clock.
        waited: by thread, seconds for which it could run and another process had its core. Threads that Python started
            do other work, such as writing to disk, and do not count; what they may have made others wait is left out.
            Empty where the kernel does not say, and where it would say more than what other processes take: with more
            threads than cores, or with a quota of processor time.
    """

    passed: float = 0.0
    waited: Mapping[str, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        """Start."""
        self._before = _reading()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.passed = time.perf_counter() - self._started
        before, after = self._before, _reading()
        if before is not None and after is not None:
            self.waited = after.waited_since(before)

    @property
    def quiet(self) -> float:
        """Seconds that would have passed on a quiet machine.

        Work goes on while every thread has a core. Threads lose their cores independently of each other, so that the
        share of this time is the product of the shares for which each thread had one.
        """
        if not self.passed:
            return 0.0
        shares = (min(waited / self.passed, MOST_WAITING) for waited in self.waited.values())
        return self.passed * math.prod(1 - share for share in shares)


class _Reading(NamedTuple):
    """What the kernel has counted, in seconds: waiting by thread, and the processor time of Python's other threads."""

    waited: dict[str, float]
    others_worked: float

    def waited_since(self, before: _Reading) -> dict[str, float]:
        """Waiting since another reading, less what Python's other threads may have caused."""
        waited = {thread: seconds - before.waited.get(thread, 0.0) for thread, seconds in self.waited.items()}
        worked, total = max(self.others_worked - before.others_worked, 0.0), sum(waited.values())
        share = max(1 - worked / total, 0.0) if total else 0.0
        return {thread: share * seconds for thread, seconds in waited.items()}


def _reading() -> _Reading | None:
    """What this thread, and threads that libraries started, have waited so far; None where that is not known."""
    if not _tells_of_others(torch.get_num_threads()):
        return None
    own, waited, worked = threading.get_native_id(), dict[str, float](), 0.0
    others = {str(thread.native_id) for thread in threading.enumerate() if thread.native_id != own}
    try:
        for thread in (PROC / "self" / "task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                seconds = [int(number) / 1e9 for number in (thread / "schedstat").read_text(encoding="ascii").split()]
                if thread.name in others:
                    worked += seconds[0]
                else:
                    waited[thread.name] = seconds[1]
    except (OSError, MemoryError, ValueError, IndexError):
        return None
    return _Reading(waited, worked)


@cache
def _tells_of_others(threads: int) -> bool:
    """Whether the kernel counts waiting for other processes, and no other: each thread has a core, and no quota."""
    if not (PROC / "self" / "schedstat").exists():
        return False
    return threads <= len(os.sched_getaffinity(0)) and not has_core_quota()
