"""A core of its own for each compute thread of this process, where it has as many threads as cores.

At every layer compute threads wait for each other, and they keep their cores busy meanwhile. Beside another process,
Linux may put two of them on one core, where each waits for the one that cannot run. Threads that are bound to different
cores cannot meet. The first thread is bound only while it computes: threads and processes that it starts inherit its
cores, and those that decode images or write to disk would all share one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from snugfit._core.machine_memory import PROC


@dataclass(frozen=True)
class _Team:
    """Compute threads that have cores of their own: the first thread, and those that ``start`` started.

    Attributes:
        leader: id of the first thread.
        cores: those of the process; the first one is the leader's while it computes.
        start: starts the other threads.
    """

    leader: int
    cores: tuple[int, ...]
    start: Callable[[], object]


_teams: list[_Team] = []
"""The team of this process, if it has one."""


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use, also while a thread is bound to one of them."""
    if _teams:
        return _teams[0].cores
    return (
        tuple(sorted(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else tuple(range(os.cpu_count() or 1))
    )


def give_own_cores(threads: int, start: Callable[[], object]) -> None:
    """Start compute threads, and bind each to a core of its own; the calling thread is bound by :func:`on_own_core`.

    Nothing is bound with fewer threads than cores, since two such processes would choose the same ones, in one of
    several processes of a run, if threads run already, and where the system cannot.

    Args:
        threads: how many compute, the calling one included.
        start: makes a library start all others, if they do not run yet.
    """
    cores = usable_cores()
    _teams.clear()
    if threads != len(cores) or threads == 1 or "WORLD_SIZE" in os.environ or not hasattr(os, "sched_setaffinity"):
        return
    before = _threads()
    start()
    started = sorted(_threads() - before)
    if len(started) == threads - 1 and all(_bind(each, {core}) for each, core in zip(started, cores[1:], strict=True)):
        _teams.append(_Team(threading.get_native_id(), cores, start))


def restart_own_cores() -> None:
    """Start the compute threads again and bind them, after all have ended or in a forked process."""
    if _teams:
        give_own_cores(len(_teams[0].cores), _teams[0].start)


@contextmanager
def on_own_core() -> Iterator[None]:
    """Let the calling thread compute on its own core, if compute threads have cores of their own."""
    if not _teams or threading.get_native_id() != _teams[0].leader or not _bind(0, {_teams[0].cores[0]}):
        yield
        return
    try:
        yield
    finally:
        leave_own_core()


def leave_own_core() -> None:
    """Let the calling thread run on all cores of the process; it may have been started on that of a compute thread."""
    if _teams:
        _bind(0, set(_teams[0].cores))


def _threads() -> set[int]:
    """Ids of this process's threads; none where the system does not list them."""
    listed = PROC / "self" / "task"
    return {int(each.name) for each in listed.iterdir()} if listed.exists() else set()


def _bind(thread: int, cores: set[int]) -> bool:
    """Whether a thread was bound: 0 is the calling one. The process may have lost a core, or a thread have ended."""
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:
        return False
    return True
