"""The process's memory from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FIELDS = {"RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem", "VmData": "data", "VmHWM": "high_water"}


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
        descriptor = os.open(_CLEAR_REFS, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(descriptor, b"5")
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
