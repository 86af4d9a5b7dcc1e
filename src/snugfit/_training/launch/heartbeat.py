"""Heartbeats of all processes, so that a process that died, was stopped or disconnected can be named."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType

from snugfit._training.launch.store import Store, connect, names
from snugfit._training.launch.world import GATEWAY, World
from snugfit.errors import WorkerLostError

_OVERDUE = 2.5
"""Number of intervals without a heartbeat after which a process is suspect."""
_FAILED = -(10**12)
_POLL_SECONDS = 0.02


@dataclass
class _Seen:
    """The last known state of a process: its count of beats, and when that changed."""

    count: int
    at: float


class Heartbeat:
    """A thread that increments a counter in the store, over its own connection, and watches the others' counters.

    The thread keeps beating during a long computation of the main thread. The beats of a process that is killed,
    stopped or disconnected no longer arrive. A context manager.

    Args:
        here: this process.
        limit_seconds: silence after which a process is lost; the timeout of the launch by default.
        interval_seconds: between two beats.
    """

    def __init__(self, here: World, limit_seconds: float | None = None, interval_seconds: float = 1.0) -> None:
        self.here, self.limit = here, here.timeout_seconds if limit_seconds is None else limit_seconds
        self.interval = min(interval_seconds, self.limit / 4)
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
        self._peace, self._fault = error is None, not isinstance(error, (WorkerLostError, type(None)))
        self._stop.set()
        self._thread.join(2 * self.interval + (self.limit if self._peace else 2 * _OVERDUE * self.interval))

    def lost(self, limit: float | None = None) -> list[int]:
        """Ranks that have been silent for longer than the limit, or left because of an error.

        If the store itself falls silent, the processes that were silent before are lost, or else the gateway.

        Args:
            limit: seconds of silence; the heartbeat's own by default.
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
        if self.here.is_gateway and not self._peace:
            time.sleep(_OVERDUE * self.interval)  # so that others see who was lost before the store is gone
        left, deadline = store.add("left", int(self._peace)), time.monotonic() + self.limit
        while self._peace and self.here.is_gateway and left < self.here.size and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            left = store.add("left", 0)
