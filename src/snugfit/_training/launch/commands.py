"""Commands of the gateway to the other processes, which may wait long for them."""

from __future__ import annotations

import contextlib
import queue
import threading
from datetime import timedelta
from types import TracebackType

from snugfit._training.launch.heartbeat import Heartbeat, lost_error
from snugfit._training.launch.store import connect, sealed_get, sealed_set
from snugfit._training.launch.world import GATEWAY
from snugfit.errors import WorkerLostError

_POLL_SECONDS = 0.2
_WAKING_SECONDS = 0.5
_WAIT = timedelta(days=1)
"""Longer than any pause between two commands, because torch writes a warning whenever a wait times out."""


class Commands:
    """A channel from the gateway to every other process, through the store.

    A collective fails after its timeout, but a gateway that plans, reads data or writes a checkpoint may take minutes
    until the next command. Here the others wait for as long as the gateway's heart beats. A context manager.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat, self._sent, self._received = heartbeat, 0, 0
        self._inbox: queue.Queue[str | RuntimeError | WorkerLostError] = queue.Queue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="snugfit-commands", daemon=True)

    def __enter__(self) -> Commands:
        """Begin to listen, except on the gateway; raises WorkerLostError if the gateway does not answer."""
        self._store = connect(self.heartbeat.here, self.heartbeat.limit)
        if not self.heartbeat.here.is_gateway:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening: a message of its own wakes the thread, which must not be inside torch when Python ends."""
        self._stop.set()
        if self._thread.is_alive() and GATEWAY not in self.heartbeat.lost():
            with contextlib.suppress(RuntimeError, WorkerLostError):
                connect(self.heartbeat.here, _WAKING_SECONDS).set(self._key(self._received), "")
            self._thread.join(_WAKING_SECONDS)

    def send(self, command: str) -> None:
        """Send a command to all others; on the gateway."""
        for rank in range(1, self.heartbeat.here.size):
            sealed_set(self.heartbeat.here, self._store, f"command/{rank}/{self._sent}", command)
        self._sent += 1

    def receive(self) -> str:
        """Wait for the next command, for as long as the gateway's heart beats; on all others.

        Raises:
            WorkerLostError: a process was lost meanwhile, or another program wrote the command.
        """
        while True:
            try:
                came = self._inbox.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self.heartbeat.lost():
                    raise lost_error(self.heartbeat) from None
                continue
            if isinstance(came, WorkerLostError):
                raise came
            if isinstance(came, RuntimeError):
                raise lost_error(self.heartbeat, str(came)) from came
            return came

    def _listen(self) -> None:
        """Fetch commands as they come, off the main thread: a store that stops answering blocks for good."""
        try:
            while not self._stop.is_set():
                self._store.wait([self._key(self._received)], _WAIT)
                if self._stop.is_set():
                    return
                self._inbox.put(sealed_get(self.heartbeat.here, self._store, self._key(self._received)))
                self._store.delete_key(self._key(self._received))
                self._received += 1
        except (RuntimeError, WorkerLostError) as error:
            self._inbox.put(error)

    def _key(self, number: int) -> str:
        return f"command/{self.heartbeat.here.rank}/{number}"
