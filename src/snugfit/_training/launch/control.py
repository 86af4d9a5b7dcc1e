"""The agent's connection to the launcher: orders on stdin, reports on stdout, one JSON object per line, over ssh.

Orders are ``{"order": NAME, ...}``: ``begin`` (with the ``secret`` of the launch), ``beat``, ``signal``, ``probe``,
``round`` and ``end``. Reports are ``{"said": NAME, ...}``: ``ready``, ``beat``, ``reached``, ``failed``, ``done`` and
``out`` (a line that a worker printed). JSON alone crosses between hosts; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import IO, Any

_SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}
_BEAT_SECONDS = 1.0
_LAST_SECONDS = 40.0
_LOST = 8


class Control:
    """Orders of the launcher, and reports to it.

    The workers' output goes through a pipe of the agent, so that no report is split.

    Attributes:
        ended: set once the launcher has ended the launch.
        heard: time of the last order, by the monotonic clock.

    Args:
        orders: stream of orders.
        age: seconds since this host last reached the store; None while it does not try.
    """

    def __init__(self, orders: IO[str], age: Callable[[], float | None]) -> None:
        self.secret, self.ended, self.heard = "", threading.Event(), time.monotonic()
        self._orders, self._age = orders, age
        self._waiting: queue.Queue[dict[str, Any]] = queue.Queue()
        self._lock = threading.Lock()
        self._reports = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(writing)
        self._printed = os.fdopen(reading, encoding="utf-8", errors="surrogateescape")

    def start(self) -> None:
        """Wait for the first order, then start threads that obey, beat and forward output."""
        self._begin()
        self._passing = threading.Thread(target=self._pass_on, name="snugfit-out", daemon=True)
        others = [threading.Thread(target=each, name="snugfit-line", daemon=True) for each in (self._obey, self._beat)]
        for each in (self._passing, *others):
            each.start()

    def tell(self, said: str, **more: Any) -> None:
        """Send a report; a lost launcher is noticed when its orders end."""
        with self._lock:
            self._write({"said": said, **more})

    def _write(self, report: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._reports.write(json.dumps(report) + "\n")
            self._reports.flush()

    def pending(self) -> bool:
        """Whether the launcher wants the workers stopped, and a new round."""
        return not self._waiting.empty()

    def next_order(self, patience: float) -> dict[str, Any] | None:
        """The next order for the rendezvous; None if there is none within the given seconds."""
        try:
            return self._waiting.get(timeout=patience)
        except queue.Empty:
            return None

    def finish(self) -> None:
        """Forward the last lines of the workers."""
        os.dup2(2, 1)
        self._passing.join(_BEAT_SECONDS)

    def _begin(self) -> None:
        order = _parsed(self._orders.readline())
        self.secret = str(order.get("secret", ""))

    def _obey(self) -> None:
        for line in self._orders:
            order = _parsed(line)
            name, self.heard = order.get("order"), time.monotonic()
            if name == "signal":
                os.kill(os.getpid(), _SIGNALS.get(str(order.get("name")), signal.SIGTERM))
            elif name == "end":
                self.ended.set()
            elif name in ("probe", "round"):
                self._waiting.put(order)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_SECONDS)
        os._exit(_LOST)  # stuck in native code, on a connection that was cut

    def _beat(self) -> None:
        while True:
            with self._lock:  # so that no age from before a probe follows its answer
                self._write({"said": "beat", "age": self._age()})
            time.sleep(_BEAT_SECONDS)

    def _pass_on(self) -> None:
        for line in self._printed:
            self.tell("out", line=line)


def _parsed(line: str) -> dict[str, Any]:
    """An order; an empty one if the line is invalid."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
