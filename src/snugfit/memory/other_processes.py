"""The private memory of a run's other processes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

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
            with contextlib.suppress(OSError, MemoryError):
                self._children_bytes = sum(_unshared_bytes(child) for child in _children("self"))
        return self._children_bytes + (0 if self._waiting is None else private_bytes(self._waiting))


def _children(process: str) -> Iterator[str]:
    """Ids of the processes that a process started, and of theirs.

    The kernel lists them, mostly; where it does not, psutil does, whose import takes 0.6 MB.
    """
    if not (PROC / "thread-self" / "children").exists():
        import psutil

        with contextlib.suppress(psutil.Error):
            yield from (str(child.pid) for child in psutil.Process().children(recursive=True))
        return
    for file in (PROC / process / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in file.read_text(encoding="ascii").split():
                yield child
                yield from _children(child)


def _unshared_bytes(process: str) -> int:
    """Private memory of a process without pages that it shares with the process that it was forked from."""
    return counts(PROC / process / "smaps_rollup").get("Private_Dirty:", 0) * 1024
