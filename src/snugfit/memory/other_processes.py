"""The private memory of a run's other processes."""

from __future__ import annotations

import contextlib
import math
import time

import psutil

from snugfit._core.machine_memory import PROC, counts, private_bytes

LIST_SECONDS = 5.0
"""Time between two listings of child processes, each of which takes a few milliseconds."""


class OtherProcesses:
    """The process that waits for this one, if any, and the children of this one."""

    def __init__(self, waiting: int | None) -> None:
        self._waiting, self._listed, self._children_bytes = waiting, -math.inf, 0

    def read(self) -> int:
        """Their private memory in bytes; pages that a child shares with this process do not count again."""
        now = time.monotonic()
        if now - self._listed > LIST_SECONDS:
            self._listed = now
            with contextlib.suppress(OSError, psutil.Error, MemoryError):
                children = psutil.Process().children(recursive=True)
                self._children_bytes = sum(_unshared_bytes(child.pid) for child in children)
        return self._children_bytes + (0 if self._waiting is None else private_bytes(self._waiting))


def _unshared_bytes(process: int) -> int:
    """Private memory of a process without pages that it shares with the process that it was forked from."""
    return counts(PROC / str(process) / "smaps_rollup").get("Private_Dirty:", 0) * 1024
