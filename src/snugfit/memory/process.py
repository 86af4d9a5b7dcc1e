"""The memory of this process: readings from /proc, and the baseline before model and data exist."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from snugfit._core.options import Workers, checked
from snugfit._upstream import to_channels_last
from snugfit.memory.deferred_imports import defer_imports
from snugfit.memory.device import release_devices
from snugfit.memory.heap import set_allocator, trim_heap

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FIELDS = {"RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem", "VmData": "data", "VmHWM": "high_water"}
_THREAD_STACK_BYTES = 512 * 1024
_KERNELS_KEPT = 192
"""Number of generated kernels that oneDNN caches; with its default of 1024 their memory grows with every new shape."""


@dataclass(frozen=True)
class MemoryStatus:
    """One reading, in bytes.

    Attributes:
        anon: resident private anonymous memory (RssAnon), which a memory budget limits.
        file, shmem: resident file-backed and shared memory, which the budget does not count.
        data: private writable mappings, resident or not (VmData), which ``RLIMIT_DATA`` limits.
        high_water: largest resident set since the last reset (VmHWM).
    """

    anon: int
    file: int = 0
    shmem: int = 0
    data: int = 0
    high_water: int = 0


def has_proc() -> bool:
    """Whether this system has Linux's /proc/self/status with RssAnon."""
    return _STATUS.exists()


def read_status() -> MemoryStatus:
    """Read the process's memory; without /proc, psutil's unique (or resident) set replaces RssAnon."""
    if not has_proc():
        import psutil

        info = psutil.Process().memory_full_info()
        return MemoryStatus(anon=getattr(info, "uss", info.rss))
    values = {}
    with _STATUS.open("rb") as status:
        for line in status:
            name, _, rest = line.partition(b":")
            field = _FIELDS.get(name.decode())
            if field is not None:
                values[field] = int(rest.split()[0]) * 1024
    return MemoryStatus(**values)


def reset_high_water() -> bool:
    """Start a new interval for VmHWM; False if the kernel does not allow it."""
    try:
        with os.fdopen(os.open(_CLEAR_REFS, os.O_WRONLY), "wb", buffering=0) as file:
            file.write(b"5")
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Baseline:
    """Memory of the resting process, in bytes.

    Attributes:
        anon: RssAnon; peaks are measured above it.
        data: VmData; ``RLIMIT_DATA`` is this plus the budget.
        waiting: id of a process that waits for this one, whose memory counts to that of all processes.
    """

    anon: int
    data: int
    waiting: int | None = None


def prepare_process(threads: int | None = None, waiting: int | None = None) -> Baseline:
    """Start threads, warm up torch, set the allocator, and take the baseline.

    The warm-up runs one tiny forward, backward and optimizer step. Modules of torch that only compilers need (dynamo,
    inductor, sympy) are not imported until something else uses them. cuDNN's algorithms are deterministic from here on.

    Args:
        threads: compute threads; torch's own choice by default.
        waiting: id of a process that waits for this one, if its memory is to count too.

    Raises:
        UsageError: ``threads`` is not a valid number of threads.
    """
    threads = checked("threads", Workers | None, threads)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KERNELS_KEPT))
    set_allocator()
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    threading.stack_size(_THREAD_STACK_BYTES)
    if threads is not None:
        torch.set_num_threads(threads)
    defer_imports(library_import)
    warm_up()
    release_memory()
    gc.freeze()  # what exists by now stays: collecting garbage need not look at it again, which took 150 ms each time
    _late_bytes.clear()
    _own[:] = [waiting is not None]
    status = read_status()
    return Baseline(anon=status.anon, data=status.data, waiting=waiting)


MOST_LATE_BYTES = 80 * 2**20
"""More than all imports that are deferred take together: 68 MiB."""


@contextlib.contextmanager
def library_import() -> Iterator[None]:
    """Let what is imported inside belong to the resting process: it neither counts nor is refused.

    What other threads allocate meanwhile cannot be told apart, so at most :data:`MOST_LATE_BYTES` count as imports.
    """
    if _importing:
        yield
        return
    (soft, hard), before = resource.getrlimit(resource.RLIMIT_DATA), read_status()
    known = len(sys.modules)
    _importing.append(True)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        _importing.clear()
        after = read_status() if len(sys.modules) > known else before
        _late_bytes.append(max(min(after.anon - before.anon, MOST_LATE_BYTES - late_bytes()), 0))
        grown = soft if soft == resource.RLIM_INFINITY else soft + after.data - before.data
        resource.setrlimit(resource.RLIMIT_DATA, (grown, hard))


_importing: list[bool] = []
_late_bytes: list[int] = []
_own: list[bool] = [False]


def is_own_process() -> bool:
    """Whether this process was started for the run and does nothing else, so that its heap has no other fragments."""
    return _own[0]


def late_bytes() -> int:
    """Private memory of all imports inside :func:`library_import` so far, which is part of no baseline."""
    return sum(_late_bytes)


def warm_up() -> None:
    """Use everything that training uses: threads, convolution, normalisation, pooling, loss, optimizers, autocast."""
    state = torch.get_rng_state()
    network: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    )
    to_channels_last(network)
    for optimizer in (
        torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True),
        torch.optim.AdamW(network.parameters(), lr=0.1, fused=True),
    ):
        for precision in (torch.float32, torch.bfloat16):
            images = torch.randn(8, 3, 8, 8).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is torch.bfloat16):
                loss = nn.functional.cross_entropy(network(images), torch.zeros(8, dtype=torch.int64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.set_rng_state(state)


def release_memory() -> None:
    """Collect garbage (without it nothing is freed after an out-of-memory error), trim the heap, and empty caches.

    Call it after the ``except`` clause of an error, which keeps the error alive. Autograd keeps the last error of a
    backward pass, and through its traceback parameters and gradients, until another pass succeeds; so one is run.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros(1, requires_grad=True).sum().backward()
    gc.collect()
    trim_heap()
    release_devices()
