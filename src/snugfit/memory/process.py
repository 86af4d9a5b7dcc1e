"""The memory of processes: readings from /proc of this one and the run's others, and the baseline of this one.

The baseline is taken before model and data exist. Of mapped files, such as library code, only what a process uses at
once counts: the kernel drops the rest where memory is short.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from snugfit._core.machine_memory import PROC, counts, private_bytes
from snugfit._core.options import Workers, checked
from snugfit._core.own_cores import free_leader
from snugfit._upstream import to_channels_last
from snugfit.memory.deferred_imports import defer_imports
from snugfit.memory.device import release_devices
from snugfit.memory.heap import set_allocator, trim_heap

_STATUS = Path("/proc/self/status")
_STATM_BYTES = 128
PAGE_BYTES = resource.getpagesize()
_CLEAR_REFS, _MAPPINGS = Path("/proc/self/clear_refs"), Path("/proc/self/smaps")
_FIELDS = {"anon": b"RssAnon:", "file": b"RssFile:", "shmem": b"RssShmem:", "data": b"VmData:", "high_water": b"VmHWM:"}
_STATUS_BYTES = 8192
"""More than the fields and those before them take."""


class _Status(threading.local):
    """A buffer of each thread: a reading allocates next to nothing, since it must work where the limit is reached."""

    def __init__(self) -> None:
        self.text = bytearray(_STATUS_BYTES)


_status = _Status()
_THREAD_STACK_BYTES = 512 * 1024
_KERNELS_KEPT = 384
"""Number of generated kernels that oneDNN caches: those of MobileNetV2 at two batch sizes, and half as many more. With
fewer it generates them anew in every step, and with its default of 1024 their memory grows with every new shape."""
LIST_SECONDS = 5.0
"""Time between two listings of child processes, each of which takes a few milliseconds."""


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
    try:
        status = os.open(_STATUS, os.O_RDONLY)
    except FileNotFoundError:
        import psutil

        info = psutil.Process().memory_full_info()
        return MemoryStatus(anon=getattr(info, "uss", info.rss))
    text = _status.text
    try:
        os.readv(status, [text])
    finally:
        os.close(status)
    return MemoryStatus(**{field: _bytes_at(text, text.find(name) + len(name)) for field, name in _FIELDS.items()})


@contextmanager
def quick_readings() -> Iterator[Callable[[], tuple[int, int]]]:
    """A function that reads resident memory, and the file-backed and shared part of it, in bytes; on Linux.

    It takes two microseconds. It reads the process that entered the context, also after a fork.
    """
    statm = os.open("/proc/self/statm", os.O_RDONLY)

    def read() -> tuple[int, int]:
        _, resident, shared, *_ = os.pread(statm, _STATM_BYTES, 0).split(maxsplit=3)
        return int(resident) * PAGE_BYTES, int(shared) * PAGE_BYTES

    try:
        yield read
    finally:
        os.close(statm)


def mapped_bytes() -> int:
    """Bytes that ``RLIMIT_DATA`` counts, and those of the stack; on Linux, in some microseconds."""
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.pread(statm, _STATM_BYTES, 0).split()[5]) * PAGE_BYTES
    finally:
        os.close(statm)


def _bytes_at(text: bytearray, place: int) -> int:
    """A number of kB, in bytes."""
    return int(text[place : text.index(b"kB", place)]) * 1024


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
    inductor, sympy) are not imported until something else uses them. If OpenMP binds its threads to cores, this
    one, which leads them, is bound only while it computes. cuDNN's algorithms are deterministic from here on.

    Args:
        threads: compute threads; torch's own choice by default.
        waiting: id of a process that waits for this one, if its memory is to count too.

    Raises:
        UsageError: ``threads`` is not a valid number of threads.
    """
    threads = checked("threads", Workers | None, threads)
    free_leader()
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


class PageMapping(NamedTuple):
    """What mapping memory has cost a thread.

    Attributes:
        seconds: the time that the system worked for the thread; in a training step it does little but map memory. Other
            threads map memory at the same time. The time is counted in ticks of some milliseconds.
        pages: number of pages that the thread has mapped, which is precise.
    """

    seconds: float
    pages: int

    @classmethod
    def so_far(cls) -> PageMapping:
        """Since the calling thread began; without Linux, an equal share of the process."""
        if sys.platform.startswith("linux"):
            used = resource.getrusage(resource.RUSAGE_THREAD)
            return cls(used.ru_stime, used.ru_minflt)
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_stime / torch.get_num_threads(), used.ru_minflt)

    def since(self, before: PageMapping) -> PageMapping:
        """What came after another reading."""
        return PageMapping(self.seconds - before.seconds, self.pages - before.pages)


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


def touched_file_bytes(work: Callable[[], object]) -> int | None:
    """Bytes of mapped files that ``work`` reads, in pages; None where the kernel does not tell.

    Linux marks every page that is accessed; the marks are removed before (proc(5), ``clear_refs``). Pages that the
    process has changed are private memory and left out.
    """
    try:
        with os.fdopen(os.open(_CLEAR_REFS, os.O_WRONLY), "wb", buffering=0) as file:
            file.write(b"1")
        work()
        return _touched(_MAPPINGS.read_text())
    except OSError:
        return None


def _touched(mappings: str) -> int:
    """Accessed bytes of the files among the mappings, private pages left out."""
    total, is_file, accessed = 0, False, 0
    for line in mappings.splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_file = rest[3] != "0"
        elif first == "Referenced:":
            accessed = int(rest[0])
        elif first == "Anonymous:" and is_file:
            total += max(accessed - int(rest[0]), 0)
    return total * 1024


class OtherProcesses:
    """The process that waits for this one, if any, and the children of this one."""

    def __init__(self, waiting: int | None) -> None:
        self._waiting, self._listed, self._children_bytes = waiting, -math.inf, 0

    def read(self) -> int:
        """Their private memory in bytes; pages that a child shares with this process do not count again."""
        now = time.monotonic()
        if now - self._listed > LIST_SECONDS:
            self._listed = now
            with contextlib.suppress(OSError, MemoryError):
                self._children_bytes = sum(_unshared_bytes(child) for child in _children("self"))
        return self._children_bytes + (0 if self._waiting is None else private_bytes(self._waiting))


def _children(process: str) -> Iterator[str]:
    """Ids of the processes that a process started, and of theirs.

    The kernel lists them, mostly; where it does not, psutil does, whose import takes 0.6 MB.
    """
    if not (PROC / "thread-self" / "children").exists():
        import psutil

        with contextlib.suppress(psutil.Error):
            yield from (str(child.pid) for child in psutil.Process().children(recursive=True))
        return
    for file in (PROC / process / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in file.read_text(encoding="ascii").split():
                yield child
                yield from _children(child)


def _unshared_bytes(process: str) -> int:
    """Private memory of a process without pages that it shares with the process that it was forked from."""
    return counts(PROC / process / "smaps_rollup").get("Private_Dirty:", 0) * 1024
