"""Heartbeats of all processes, which name a process that died, was stopped or disconnected."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist
from torch.distributed import Store

from snugfit._training.launch.store import connect, names
from snugfit._training.launch.world import GATEWAY, World
from snugfit.errors import WorkerLostError

_INTERVAL_SECONDS = 1.0
_OVERDUE = 2.5
"""Number of intervals without a heartbeat after which a process is suspect."""
_FAILED = -(10**12)
_POLL_SECONDS = 0.02
_OF_PEERS = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|timed ?out|broken pipe|socket|recvvalue|store", re.IGNORECASE
)
_TIMED_OUT = re.compile(r"timed ?out", re.IGNORECASE)


@dataclass
class _Seen:
    """The last known state of a process: its count of beats, and when that changed."""

    count: int
    at: float


class Heartbeat:
    """A thread that increments a counter in the store, over its own connection, and watches the others' counters.

    The thread keeps beating during a long computation of the main thread. The beats of a process that is killed,
    stopped or disconnected no longer arrive. A context manager.
    """

    def __init__(self, here: World) -> None:
        self.here, self.limit = here, here.timeout_seconds
        self.interval = min(_INTERVAL_SECONDS, self.limit / 4)
        self._store: Store | None = None
        self._names: dict[int, str] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="snugfit-heartbeat", daemon=True)
        self._broken = False

    def __enter__(self) -> Heartbeat:
        """Start; every other process has the full limit from now on.

        Raises:
            WorkerLostError: the gateway does not answer.
        """
        now = time.monotonic()
        self._answered = self._began = now
        self._seen = {rank: _Seen(-1, now) for rank in range(self.here.size) if rank != self.here.rank}
        self._store = connect(self.here, self.limit)
        self._names = names(self.here, self._store, self.limit)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; a process that leaves because of its own error reports that, and is lost to the others at once.

        Without errors the gateway waits until all have left, because the store ends with it.
        """
        self._failed, self._fault = error is not None, not isinstance(error, (WorkerLostError, type(None)))
        self._stop.set()
        self._thread.join(2 * self.interval + (2 * _OVERDUE * self.interval if self._failed else self.limit))

    def lost(self, limit: float | None = None) -> list[int]:
        """Ranks that have been silent for ``limit`` seconds (the heartbeat's own by default), or left by an error.

        If the store itself falls silent, the processes that were silent before are lost, or else the gateway.
        """
        limit = self.limit if limit is None else limit
        with self._lock:
            now = time.monotonic()
            if self._broken or now - self._answered > limit:
                last, patience = self._answered, _OVERDUE * self.interval
                return [rank for rank, seen in self._seen.items() if last - seen.at > patience] or [GATEWAY]
            return [rank for rank, seen in self._seen.items() if now - seen.at > limit]

    def describe(self, rank: int) -> str:
        """A rank with its process and host, like ``rank 1 (process 4711 on nano-2, 10.0.0.3)``."""
        return f"rank {rank} ({self._names[rank]})" if rank in self._names else f"rank {rank}"

    def _run(self) -> None:
        try:
            assert self._store is not None
            self._beat(self._store)
            while not self._stop.wait(self.interval):
                self._beat(self._store)
            self._leave(self._store)
        except RuntimeError:
            with self._lock:
                self._broken = True

    def _beat(self, store: Store) -> None:
        """Increment the own counter and read all others; after a pause of its own, missed beats do not count."""
        began = time.monotonic()
        store.add(f"beat/{self.here.rank}", 1)
        counts = {rank: store.add(f"beat/{rank}", 0) for rank in self._seen}
        with self._lock:
            now = time.monotonic()
            paused = began - self._began > self.limit
            self._began, self._answered = began, now
            for rank, count in counts.items():
                seen = self._seen[rank]
                if count < 0:
                    seen.at = float("-inf")
                elif count != seen.count or paused:
                    seen.count, seen.at = count, now

    def _leave(self, store: Store) -> None:
        if self._fault:
            store.add(f"beat/{self.here.rank}", _FAILED)
        if self.here.is_gateway and self._failed:
            time.sleep(_OVERDUE * self.interval)  # so that others see who was lost before the store is gone
        left, deadline = store.add("left", int(not self._failed)), time.monotonic() + self.limit
        while not self._failed and self.here.is_gateway and left < self.here.size and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            left = store.add("left", 0)


@contextlib.contextmanager
def naming_lost(heartbeat: Heartbeat) -> Iterator[None]:
    """Convert errors of collectives, at most the heartbeat's limit later, to one that names the lost process.

    Raises:
        WorkerLostError: a process died, was stopped, or cannot be reached.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or _OF_PEERS.search(str(error))):
            raise
        raise lost_error(heartbeat, str(error)) from error


def lost_error(heartbeat: Heartbeat, reason: str = "") -> WorkerLostError:
    """Wait until the heartbeat knows who is silent, and build the error; torch's ``reason`` is shown if nobody is.

    A failed collective is evidence too, so half the limit of silence is enough. A collective that already waited for
    the limit is not followed by another such wait.
    """
    patience = 2 * heartbeat.interval + (0.0 if _TIMED_OUT.search(reason) else heartbeat.limit)
    deadline = time.monotonic() + patience
    while not (ranks := heartbeat.lost(heartbeat.limit / 2)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if ranks:
        what = f"lost {' and '.join(heartbeat.describe(rank) for rank in ranks)}: it died, was stopped or was cut off."
    else:
        first = (reason.strip() or "no reason was given").splitlines()[0][:200]
        what = f"the processes lost contact though each of them is alive: {first}"
    here, advice = heartbeat.here, "`snugfit train --resume RUN` goes on from the last checkpoint."
    if here.restarts < here.max_restarts:
        again = f"restart {here.restarts + 1} of {here.max_restarts}"
        advice = f"All processes are started again, and go on from the last checkpoint ({again})."
    return WorkerLostError(f"{what}\n{advice}")
