"""Sample private anonymous memory in a thread: a second reading beside the kernel's high-water mark."""

from __future__ import annotations

import os
import threading
from pathlib import Path

SAMPLE_SECONDS = 0.005
"""Time between two samples, of 5 microseconds each."""
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class AnonSampler:
    """The largest RssAnon of this process that was sampled, in bytes; on Linux.

    A peak that lasts shorter than :data:`SAMPLE_SECONDS` may lie between two samples.
    """

    def __init__(self) -> None:
        self._highest = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="memory-sampler", daemon=True).start()

    def take(self) -> int:
        """The largest since the last call, 0 where there was no sample."""
        with self._lock:
            highest, self._highest = self._highest, 0
        return highest

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _run(self) -> None:
        with _STATM.open("rb", buffering=0) as statm:
            while not self._stopped.wait(SAMPLE_SECONDS):
                _, resident, shared, *_ = os.pread(statm.fileno(), 128, 0).split()
                anon = (int(resident) - int(shared)) * _PAGE_BYTES
                with self._lock:
                    self._highest = max(self._highest, anon)
