"""A core of its own for each compute thread of a process that has as many threads as cores.

At every layer compute threads wait for each other, and they keep their cores busy meanwhile. Beside another process,
Linux may put two of them on one core, where each waits for the one that cannot run. OpenMP can bind each thread to a
core (``OMP_PROC_BIND``, OpenMP 5.0, section 6.4). It also binds the thread that leads them, from which other threads
and processes inherit their cores: those that decode images or write to disk would all share one. So the leader is
freed, and bound again while it computes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_BINDING = "OMP_PROC_BIND"
_SETTINGS = (_BINDING, "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which OpenMP binds threads."""


@dataclass(frozen=True)
class _Leader:
    """The thread that leads OpenMP's threads: its identifier, its cores while it computes, and those of all threads."""

    thread: int
    own: frozenset[int]
    all_cores: frozenset[int]


_leaders: list[_Leader] = []
"""The leader of this process's threads, if they are bound."""


def bind_compute_threads(threads: int | None) -> None:
    """Have OpenMP bind each compute thread to a core; before torch is imported, which loads OpenMP.

    Nothing is bound with fewer threads than cores, since two such processes would choose the same ones, in one of
    several processes of a run, and if the user has said how to bind threads.

    Args:
        threads: how many compute; by default ``OMP_NUM_THREADS``, or all cores.
    """
    wanted = str(threads or os.environ.get("OMP_NUM_THREADS") or len(usable_cores()))
    if any(name in os.environ for name in (*_SETTINGS, "WORLD_SIZE")) or not hasattr(os, "sched_setaffinity"):
        return
    if wanted == str(len(usable_cores())) != "1":
        os.environ[_BINDING] = "true"


def free_leader() -> None:
    """Let this thread, which leads OpenMP's, and what it starts run on all cores outside of :func:`on_own_core`."""
    places = _places()
    if len(places) > 1:
        own = places[ctypes.CDLL(None).omp_get_place_num()]
        _leaders[:] = [_Leader(threading.get_ident(), own, frozenset().union(*places))]
        leave_own_core()


def usable_cores() -> frozenset[int]:
    """Numbers of the cores that this process may use, also while a thread is bound to one of them."""
    if _leaders:
        return _leaders[0].all_cores
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0)).union(*_places())


@contextmanager
def on_own_core() -> Iterator[None]:
    """Let the leader of bound threads compute on its own core, if it may use it; other threads are left alone."""
    leader = _leaders[0] if _leaders else None
    if leader is None or threading.get_ident() != leader.thread:
        yield
        return
    thread, before = threading.get_native_id(), os.sched_getaffinity(0)
    if not leader.own <= before or not _bind(thread, leader.own):
        yield
        return
    try:
        yield
    finally:
        _bind(thread, before)


def leave_own_core() -> None:
    """Let the calling thread run on all cores of the process; it may have been started on that of a compute thread."""
    if _leaders:
        _bind(0, _leaders[0].all_cores)


def _places() -> list[frozenset[int]]:
    """Cores of each place that OpenMP binds threads to; none if it binds no threads, or is not loaded."""
    openmp = ctypes.CDLL(None)
    if not hasattr(openmp, "omp_get_place_proc_ids") or not openmp.omp_get_proc_bind():
        return []
    found = []
    for place in range(openmp.omp_get_num_places()):
        cores = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, cores)
        found.append(frozenset(cores))
    return found


def _bind(thread: int, cores: frozenset[int] | set[int]) -> bool:
    """Whether a thread was bound: 0 is the calling one. The process may have lost a core."""
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:
        return False
    return True
