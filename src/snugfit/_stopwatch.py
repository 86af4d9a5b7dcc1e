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
from snugfit._core.own_cores import usable_cores

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class Stopwatch:
    """Times what runs inside ``with``, or in laps, and says how long it would have taken on a quiet machine.

    With several threads a busy core costs far more than its share: at every layer all threads wait for the one that has
    no core. The kernel counts how long each thread waited for one (``/proc/PID/task/TID/schedstat``).

    Attributes:
        passed: seconds by the clock.
        waited: by thread, seconds for which it could run and another process had its core. Threads that Python started
            do other work, such as writing to disk, and do not count; what they may have made others wait is left out.
            Empty where the kernel does not say, and where it would say more than what other processes take: with more
            threads than cores, with a quota of processor time, and in one of several processes of a run.
    """

    passed: float = 0.0
    waited: Mapping[str, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.lap()

    def start(self) -> None:
        """Start, or start again."""
        self._before = _reading()
        self._started = time.perf_counter()

    def lap(self) -> None:
        """Time what ran since the start or the last lap."""
        now, before = time.perf_counter(), self._before
        self._before = _reading()
        self.passed, self._started = now - self._started, now
        self.waited = {} if before is None or self._before is None else self._before.waited_since(before, self.passed)

    @property
    def quiet(self) -> float:
        """Seconds that would have passed on a quiet machine.

        Work goes on while every thread has a core. Threads lose their cores independently of each other, so that the
        share of this time is the product of the shares for which each thread had one.
        """
        if not self.passed:
            return 0.0
        return self.passed * math.prod(1 - waited / self.passed for waited in self.waited.values())

    @property
    def delay(self) -> float:
        """Seconds that other processes added."""
        return self.passed - self.quiet


class _Reading(NamedTuple):
    """What threads have done so far: by thread, seconds of waiting and of work, and the work of Python's others."""

    waited: dict[str, float]
    worked: dict[str, float]
    others_worked: float

    def waited_since(self, before: _Reading, passed: float) -> dict[str, float]:
        """Waiting in the seconds that have passed since another reading.

        The kernel adds a wait when it ends, so that one that began earlier counts in full; but a thread did not wait
        while it worked. What Python's other threads may have caused is left out.
        """
        waited = {
            thread: min(
                seconds - before.waited.get(thread, 0.0),
                max(passed - self.worked[thread] + before.worked.get(thread, 0.0), 0.0),
            )
            for thread, seconds in self.waited.items()
        }
        worked, total = max(self.others_worked - before.others_worked, 0.0), sum(waited.values())
        share = max(1 - worked / total, 0.0) if total else 0.0
        return {thread: share * seconds for thread, seconds in waited.items()}


def _reading() -> _Reading | None:
    """That of this thread, of those that libraries started, and of Python's others; None where it is not known."""
    own, found = threading.get_native_id(), _Reading({}, {}, 0.0)
    try:
        if not _tells_of_others(torch.get_num_threads()):
            return None
        others = {str(thread.native_id) for thread in threading.enumerate() if thread.native_id != own}
        for thread in (PROC / "self" / "task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                waited = int((thread / "schedstat").read_text(encoding="ascii").split()[1]) / 1e9
                if thread.name in others:
                    found = found._replace(others_worked=found.others_worked + _worked(int(thread.name)))
                else:
                    found.waited[thread.name], found.worked[thread.name] = waited, _worked(int(thread.name))
    except (OSError, MemoryError, ValueError, IndexError):
        return None
    return found


def _worked(thread: int) -> float:
    """Processor seconds of a thread of this process: unlike those in ``schedstat``, they are up to date.

    Linux makes the number of a thread's clock from that of the thread (``CPUCLOCK_PERTHREAD`` and ``CPUCLOCK_SCHED`` in
    ``include/linux/posix-timers.h``). ``time.pthread_getcpuclockid`` does so too, for Python's own threads alone.
    """
    try:
        return time.clock_gettime(~thread << 3 | 6)
    except OSError as error:
        raise ProcessLookupError(thread) from error


@cache
def _tells_of_others(threads: int) -> bool:
    """Whether the kernel counts waiting, and threads wait for nothing but processes that have no part in the run."""
    if "WORLD_SIZE" in os.environ or not (PROC / "self" / "schedstat").exists():
        return False
    return threads <= len(usable_cores()) and not has_core_quota()
