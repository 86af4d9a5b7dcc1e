"""The memory of this process: readings from /proc, the baseline before model and data exist, and what allocators keep.

MKL keeps the buffers of its matrix products, 6 MB after ResNet-18's convolutions of one sample in one thread. The
package disables that (``MKL_DISABLE_FAST_MM``), without loss of speed. If torch was loaded earlier, MKL has already
read that variable, and its buffers are freed with the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from snugfit._core.options import Workers, checked
from snugfit._upstream import to_channels_last
from snugfit.memory.deferred_imports import defer_imports
from snugfit.memory.device import release_devices

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FIELDS = {"RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem", "VmData": "data", "VmHWM": "high_water"}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
MMAP_THRESHOLD_BYTES = 64 * 1024
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


def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def set_allocator() -> bool:
    """Serve large blocks by mmap and return freed ones at once (glibc only).

    With glibc's defaults real peaks were 28-70 % above tensor bytes; with these thresholds and channels_last 2-9 %.
    There is one arena, because every further one keeps freed memory of its own.
    """
    libc = _libc()
    return libc is not None and set_thresholds(MMAP_THRESHOLD_BYTES) and libc.mallopt(_M_ARENA_MAX, 1) == 1


def sets_thresholds() -> bool:
    """Whether :func:`set_thresholds` has an effect: malloc is glibc's."""
    return _libc() is not None


def set_thresholds(mmap_bytes: int, trim_bytes: int | None = None) -> bool:
    """Map blocks of at least ``mmap_bytes`` by themselves; return the heap's end once ``trim_bytes`` of it are free.

    The second is the first by default. False where malloc is not glibc's.
    """
    libc = _libc()
    if libc is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, mmap_bytes), (_M_TRIM_THRESHOLD, trim_bytes or mmap_bytes))
    return all([libc.mallopt(option, value) == 1 for option, value in settings])


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


def trim_heap() -> None:
    """Free MKL's buffers and the free pages of the heap; small blocks that still live limit how far it shrinks."""
    mkl, libc = _mkl(), _libc()
    if mkl is not None:
        mkl.mkl_serv_free_buffers()
    if libc is not None:
        libc.malloc_trim(0)


@cache
def _mkl() -> ctypes.CDLL | None:
    """The library with torch's MKL; None if torch is built without it."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(path)) if path.exists() else None
    return library if hasattr(library, "mkl_serv_free_buffers") else None
