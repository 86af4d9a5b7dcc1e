"""Library code and other mapped files that a process uses at once; the kernel drops the rest where memory is short."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_CLEAR_REFS, _MAPPINGS = Path("/proc/self/clear_refs"), Path("/proc/self/smaps")


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
