"""Devices with a memory of their own: everything that is asked of ``torch.cuda`` and of NVML, behind one protocol.

A process takes more of a GPU than its tensors: the context, with the code of kernels, and the libraries' own workspace.
``set_per_process_memory_fraction`` limits what the caching allocator reserves and knows nothing of the rest, so a
budget leaves the allocator what is left after the memory at rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch.nn import functional as F

from snugfit._core.machine_memory import machine_memory


@dataclass(frozen=True)
class DeviceUse:
    """One reading, in bytes.

    Attributes:
        reserved: what the caching allocator holds.
        peak_reserved, peak_allocated: the most that it held, and that tensors had of it, since the last reset.
        process: all that this process has there, context included, as NVML counts it; None if unknown.
        pinned: host memory that is locked for copies.
    """

    reserved: int
    peak_reserved: int
    peak_allocated: int
    process: int | None = None
    pinned: int = 0


class DeviceMemory(Protocol):
    """The memory of one device.

    Attributes:
        total: bytes of the device.
        unified: whether the processor has the same memory, as on a Jetson.
    """

    name: str
    total: int
    unified: bool

    def used(self) -> int | None:
        """Bytes that all processes use there, read without a context; None if unknown."""

    def free(self) -> int:
        """Bytes that any process can have there."""

    def start(self) -> None:
        """Make the context, and load the libraries of convolutions and matrix products."""

    def read(self) -> DeviceUse:
        """One reading."""

    def reset_peaks(self) -> None:
        """Let the peaks begin at the current values."""

    def limit(self, reserved: int | None) -> None:
        """Let the caching allocator reserve at most so many bytes, all of the device by default."""

    def release(self) -> None:
        """Give the allocator's unused segments back to the device."""

    def synchronize(self) -> None:
        """Wait for all work."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds that work takes there, by the device's own clock."""


class CudaMemory:
    """:class:`DeviceMemory` by ``torch.cuda``, with NVML if ``nvidia-ml-py`` is installed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._nvml = _nvml()
        found = torch.cuda.get_device_properties(device)
        self.name, self.total = found.name, found.total_memory
        self.unified = bool(getattr(found, "is_integrated", False))

    def used(self) -> int | None:
        """Bytes by NVML, or those of the whole machine if the memory is unified."""
        if self.unified:
            return self.total - machine_memory(0).free_bytes
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError, RuntimeError):
                return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle(self._nvml)).used)
        return None

    def free(self) -> int:
        """Bytes by CUDA, or what the machine has available if the memory is unified."""
        return machine_memory(0).free_bytes if self.unified else int(torch.cuda.mem_get_info(self.device)[0])

    def start(self) -> None:
        """One small convolution, matrix product and backward pass."""
        with torch.random.fork_rng([self.device]), torch.enable_grad():
            images = torch.randn(2, 8, 8, 8, device=self.device)
            weight = torch.randn(8, 8, 3, 3, device=self.device, requires_grad=True)
            (F.conv2d(images, weight).flatten(1)[:, :8] @ weight[:, :, 0, 0]).sum().backward()
        self.synchronize()

    def read(self) -> DeviceUse:
        """Statistics of the allocator, and NVML's."""
        found = torch.cuda.memory_stats_as_nested_dict(self.device)  # empty before the context exists
        reserved, allocated = (found.get(name, {}).get("all", {}) for name in ("reserved_bytes", "allocated_bytes"))
        pinned = torch.cuda.host_memory_stats_as_nested_dict().get("allocated_bytes", {})
        return DeviceUse(
            reserved.get("current", 0),
            reserved.get("peak", 0),
            allocated.get("peak", 0),
            self._process(),
            int(pinned.get("current", 0)),
        )

    def reset_peaks(self) -> None:
        """Reset the allocator's peaks."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def limit(self, reserved: int | None) -> None:
        """Set the fraction of the device's memory."""
        share = 1.0 if reserved is None else min(max(reserved, 0) / self.total, 1.0)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def release(self) -> None:
        """Empty the caches of device memory and, where torch has a name for it, of pinned memory."""
        torch.cuda.empty_cache()
        empty_host = getattr(torch.accelerator, "empty_host_cache", None)
        if empty_host is not None:
            empty_host()

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Time between two events in the current stream."""
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        started.record(stream)
        work()
        ended.record(stream)
        ended.synchronize()
        return float(started.elapsed_time(ended)) / 1000

    def _handle(self, nvml: ModuleType) -> object:
        return nvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(self.device))

    def _process(self) -> int | None:
        """NVML lists processes by their ids outside of containers, so inside of one there may be none of this id."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError, RuntimeError):
                for each in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle(self._nvml)):
                    if each.pid == os.getpid() and each.usedGpuMemory:
                        return int(each.usedGpuMemory)
        return None


def _nvml() -> ModuleType | None:
    """The initialised module of ``nvidia-ml-py``; None without it, or without a driver that it knows."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # its errors are known only once it is imported
        return None
    return pynvml  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[torch.device], DeviceMemory]] = {"cuda": CudaMemory}
"""By type of device; all others use the processor's memory."""


def has_own_memory(device: torch.device | str) -> bool:
    """Whether a device has a memory of its own, so that a budget is of the device."""
    return torch.device(device).type in KINDS


@dataclass(frozen=True)
class DeviceAtRest:
    """A device, and what this process takes of it before model and data exist: context and libraries.

    Attributes:
        memory: the device.
        context_bytes: bytes beyond the allocator's reserve.
        source: how they were found.
    """

    memory: DeviceMemory
    context_bytes: int
    source: str

    def context_in(self, use: DeviceUse) -> int:
        """Context bytes at a reading: kernels that were loaded since then count, if NVML tells."""
        known = None if use.process is None else use.process - use.reserved
        return self.context_bytes if known is None else max(known, 0)


_at_rest: dict[torch.device, DeviceAtRest] = {}


def device_at_rest(device: torch.device) -> DeviceAtRest | None:
    """The device with its context, which is made when it is first asked for; None without a memory of its own.

    Raises:
        RuntimeError: the device refuses even the context.
    """
    if not has_own_memory(device):
        return None
    if device not in _at_rest:
        _at_rest[device] = _measured(KINDS[device.type](device))
    return _at_rest[device]


def _measured(memory: DeviceMemory) -> DeviceAtRest:
    in_use, before = memory.read().reserved > 0, memory.used()
    memory.start()
    memory.release()
    use, after = memory.read(), memory.used()
    if use.process is not None:
        return DeviceAtRest(memory, max(use.process - use.reserved, 0), "this process, by NVML")
    if before is not None and after is not None and not in_use:
        return DeviceAtRest(memory, max(after - before - use.reserved, 0), "growth of what the device uses")
    return DeviceAtRest(
        memory, max(memory.total - memory.free() - use.reserved, 0), "the device, other processes included"
    )


def is_at_rest(device: torch.device) -> bool:
    """Whether there is no context left to make there."""
    return device in _at_rest or not has_own_memory(device)


def uses_devices() -> bool:
    """Whether this process has the context of any device with a memory of its own."""
    return bool(_at_rest)


def release_devices() -> None:
    """Give unused segments of all devices at rest back, after errors and before a measurement."""
    for each in _at_rest.values():
        each.memory.release()


def synchronize(device: torch.device) -> None:
    """Wait for the work of a device that computes by itself; its kernels run while Python goes on."""
    found = device_at_rest(device)
    if found is not None:
        found.memory.synchronize()
