"""Sample private anonymous memory in a thread, in addition to the kernel's high-water mark."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from pathlib import Path

SAMPLE_SECONDS = 0.005
"""Time between two samples."""
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class AnonSampler:
    """The largest sampled RssAnon of this process, in bytes; on Linux.

    A peak shorter than :data:`SAMPLE_SECONDS` may fall between two samples. If a limit leaves no memory for a thread,
    nothing is sampled.
    """

    def __init__(self) -> None:
        self._highest = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        # Thread.start would wait for ever for a thread that lacks the memory to begin.
        with contextlib.suppress(RuntimeError, MemoryError):
            _thread.start_new_thread(self._run, ())

    def take(self) -> int:
        """The largest sample since the last call, 0 without samples."""
        with self._lock:
            highest, self._highest = self._highest, 0
        return highest

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _run(self) -> None:
        with _STATM.open("rb", buffering=0) as statm:
            while not self._stopped.wait(SAMPLE_SECONDS):
                with contextlib.suppress(MemoryError):
                    self._sample(statm.fileno())

    def _sample(self, statm: int) -> None:
        _, resident, shared, *_ = os.pread(statm, 128, 0).split()
        anon = (int(resident) - int(shared)) * _PAGE_BYTES
        with self._lock:
            self._highest = max(self._highest, anon)
