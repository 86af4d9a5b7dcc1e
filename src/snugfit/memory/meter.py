"""Measure peak memory above a baseline.

On Linux two independent readings are taken, and the larger one counts. The kernel's high-water mark (VmHWM) is reset at
every mark. Its value at the next mark, minus the file-backed pages resident by then, is the peak of private anonymous
memory in between, or less if file-backed pages grew. A thread samples RssAnon, which file-backed pages do not affect;
it may miss a short peak. Where the system drops file-backed pages meanwhile, those of the largest sample are
subtracted, or the reading would be too large by what was dropped. Elsewhere the peak is the largest reading at marks.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import weakref
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from snugfit.memory.other_processes import OtherProcesses
from snugfit.memory.process import Baseline, has_proc, late_bytes, read_status, reset_high_water

SAMPLE_SECONDS = 0.005
"""Time between two samples."""
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class PeakMeter(Protocol):
    """Peak and current memory, in bytes above the baseline; and the peak of all processes of the run, 0 if unknown."""

    metric: str
    current_bytes: int
    peak_bytes: int
    total_bytes: int

    def mark(self) -> int:
        """Record everything since the last mark; returns the peak since the last :meth:`restart`."""

    def restart(self) -> None:
        """Begin a new interval: the peak becomes the current value."""


class Samples(NamedTuple):
    """What was sampled since the last call, in bytes; 0 without samples.

    Attributes:
        anon: largest RssAnon.
        resident: largest resident set.
        shared: file-backed and shared pages of it.
    """

    anon: int = 0
    resident: int = 0
    shared: int = 0


class MemorySampler:
    """Memory of this process, sampled in a thread, if a limit leaves memory for one."""

    def __init__(self) -> None:
        self._samples = Samples()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        # Thread.start would wait for ever for a thread that lacks the memory to begin.
        with contextlib.suppress(RuntimeError, MemoryError):
            _thread.start_new_thread(self._run, ())

    def take(self) -> Samples:
        """The samples since the last call."""
        with self._lock:
            samples, self._samples = self._samples, Samples()
        return samples

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _run(self) -> None:
        with _STATM.open("rb", buffering=0) as statm:
            while not self._stopped.wait(SAMPLE_SECONDS):
                with contextlib.suppress(MemoryError):
                    self._sample(statm.fileno())

    def _sample(self, statm: int) -> None:
        _, resident, shared, *_ = (int(pages) * _PAGE_BYTES for pages in os.pread(statm, 128, 0).split())
        with self._lock:
            before = self._samples
            most = max((resident, shared), (before.resident, before.shared))
            self._samples = Samples(max(before.anon, resident - shared), *most)


class ProcessMeter:
    """Private anonymous memory of this process (RssAnon) above its baseline.

    ``total_bytes`` is the largest sum of this process's peak between two marks and of what the run's other processes
    use at the second: an upper bound while these wait.
    """

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.exact = has_proc() and reset_high_water()
        self.metric = "RssAnon peak above baseline" if self.exact else "unique set at step ends above baseline"
        self.current_bytes = self.peak_bytes = self.total_bytes = 0
        self._others = OtherProcesses(baseline.waiting)
        self._sampler = MemorySampler() if self.exact else None
        if self._sampler is not None:
            weakref.finalize(self, self._sampler.stop)
        self.restart()

    def mark(self) -> int:
        """Record everything since the last mark.

        The reading is too large only if file-backed pages were dropped in between and no sample tells; so a phase that
        maps its weights marks at every batch.
        """
        status = read_status()
        samples = Samples() if self._sampler is None else self._sampler.take()
        candidates = [status.anon, samples.anon]
        if self.exact:
            candidates.append(status.high_water - max(status.file + status.shmem, samples.shared))
            reset_high_water()
        resting = self._resting
        self.current_bytes = status.anon - resting
        self.peak_bytes = max(self.peak_bytes, max(candidates) - resting)
        self.total_bytes = max(self.total_bytes, max(candidates) + self._others.read())
        return self.peak_bytes

    @property
    def _resting(self) -> int:
        return self.baseline.anon + late_bytes()

    def restart(self) -> None:
        """Begin a new interval."""
        if self.exact:
            reset_high_water()
        if self._sampler is not None:
            self._sampler.take()
        self.current_bytes = read_status().anon - self._resting
        self.peak_bytes = self.current_bytes


class CudaMeter:
    """Memory that torch's allocator has reserved on a CUDA device."""

    metric = "max_memory_reserved"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current_bytes = self.peak_bytes = self.total_bytes = 0
        self.restart()

    def mark(self) -> int:
        """Record everything since the last restart."""
        self.current_bytes = torch.cuda.memory_reserved(self.device)
        self.peak_bytes = torch.cuda.max_memory_reserved(self.device)
        return self.peak_bytes

    def restart(self) -> None:
        """Begin a new interval."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self.mark()


def make_meter(baseline: Baseline, device: torch.device) -> PeakMeter:
    """The meter for a device."""
    return CudaMeter(device) if device.type == "cuda" else ProcessMeter(baseline)
