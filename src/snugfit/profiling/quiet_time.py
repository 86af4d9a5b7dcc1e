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
from typing import TYPE_CHECKING

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
        waited: by thread, seconds for which it could run and had no core. Threads that Python started do other work,
            and do not count. Empty where the kernel does not say, and where it would say more than what other processes
            take: with more threads than cores, or with a quota of processor time.
    """

    passed: float = 0.0
    waited: Mapping[str, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        """Start."""
        self._before = _waited()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.passed = time.perf_counter() - self._started
        self.waited = {thread: seconds - self._before.get(thread, 0.0) for thread, seconds in _waited().items()}

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


def _waited() -> dict[str, float]:
    """Seconds for which this thread, and threads that libraries started, could run and had no core."""
    if not _tells_of_others(torch.get_num_threads()):
        return {}
    own, found = threading.get_native_id(), dict[str, float]()
    others = {str(thread.native_id) for thread in threading.enumerate() if thread.native_id != own}
    with contextlib.suppress(OSError):
        for thread in (PROC / "self" / "task").iterdir():
            if thread.name not in others:
                with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or the kernel does not say
                    nanoseconds = (thread / "schedstat").read_text(encoding="ascii").split()[1]
                    found[thread.name] = int(nanoseconds) / 1e9
    return found


@cache
def _tells_of_others(threads: int) -> bool:
    """Whether the kernel counts waiting for other processes, and no other: each thread has a core, and no quota."""
    if not (PROC / "self" / "schedstat").exists():
        return False
    return threads <= len(os.sched_getaffinity(0)) and not has_core_quota()
