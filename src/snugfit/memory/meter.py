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
import threading
import time
import weakref
from typing import NamedTuple, Protocol

import torch

from snugfit.memory.device import DeviceAtRest, device_at_rest
from snugfit.memory.process import (
    Baseline,
    OtherProcesses,
    has_proc,
    late_bytes,
    quick_readings,
    read_status,
    reset_high_water,
)

SAMPLE_SECONDS = 0.005
"""Time between two samples."""


class PeakMeter(Protocol):
    """Peak and current memory, in bytes above the baseline; and the peak of all processes of the run, 0 if unknown.

    ``shares`` are the parts of the largest peak so far, by name, on a device with a memory of its own.
    """

    metric: str
    shares: dict[str, int]
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
        self._stopped = False
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
        self._stopped = True

    def _run(self) -> None:
        while not self._stopped:
            try:
                time.sleep(SAMPLE_SECONDS)
                with quick_readings() as read:
                    while not self._stopped:
                        self._sample(*read())
                        time.sleep(SAMPLE_SECONDS)
            except MemoryError:
                continue  # where a limit is reached; contextlib.suppress would allocate before it suppresses

    def _sample(self, resident: int, shared: int) -> None:
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
        self.shares: dict[str, int] = {}
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


class DeviceMeter:
    """Memory of a device that this process takes: its context, and what the caching allocator has reserved.

    Where the processor has the same memory, the growth of the process is added: the sum of two peaks, an upper bound.
    """

    def __init__(self, at_rest: DeviceAtRest, host: ProcessMeter) -> None:
        self._device, self._host, self._unified = at_rest, host, at_rest.memory.unified
        known = at_rest.memory.read().process is not None
        self.metric = f"max_memory_reserved + context {'by NVML' if known else 'at rest'}"
        if self._unified:
            self.metric += f" + {host.metric}"
        self.current_bytes = self.peak_bytes = self.total_bytes = self._context_bytes = 0
        self._host_bytes = self._largest = 0
        self.shares: dict[str, int] = {}
        self.restart()

    def mark(self) -> int:
        """Record everything since the last restart."""
        use = self._device.memory.read()
        context = self._device.context_in(use)
        self._context_bytes = max(self._context_bytes, context)
        host_peak = max(self._host.mark(), 0) + use.pinned
        self.current_bytes, peak = context + use.reserved, self._context_bytes + use.peak_reserved
        if self._unified:
            self.current_bytes += max(self._host.current_bytes, 0) + use.pinned
            peak += host_peak
        self._host_bytes = max(self._host_bytes, host_peak)
        self.peak_bytes = max(self.peak_bytes, peak)
        if peak > self._largest:
            self._largest = peak
            self.shares = {
                "context_bytes": self._context_bytes,
                "reserved_bytes": use.peak_reserved,
                "allocated_bytes": use.peak_allocated,
                "fragmentation_bytes": use.peak_reserved - use.peak_allocated,
            }
        self.shares["host_bytes"] = self._host_bytes
        return self.peak_bytes

    def restart(self) -> None:
        """Begin a new interval."""
        self._device.memory.reset_peaks()
        self._host.restart()
        self.peak_bytes = self._context_bytes = 0
        self.mark()


def make_meter(baseline: Baseline, device: torch.device) -> PeakMeter:
    """The meter for a device."""
    found = device_at_rest(device)
    if found is None:
        return ProcessMeter(baseline)
    return DeviceMeter(found, ProcessMeter(baseline))
