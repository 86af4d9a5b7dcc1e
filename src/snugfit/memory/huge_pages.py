"""Transparent huge pages, of 2 MiB on most machines: fewer page faults, and peaks that are harder to predict.

The first byte that is written in a huge page makes all of it resident. Where the system uses them for all memory
(``always`` in ``/sys/kernel/mm/transparent_hugepage/enabled``), peaks exceeded the predicted ones. So this process has
none but where a budget has room. Where they must be asked for (``madvise``), torch asks for those of tensors of at
least 2 MiB if ``THP_MEM_ALLOC_ENABLE`` is set, which the package does.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PR_SET_THP_DISABLE = 41


def are_for_large_tensors() -> bool:
    """Whether huge pages must be asked for, so that tensors of at least 2 MiB alone would be in some."""
    try:
        return "[madvise]" in _ENABLED.read_text(encoding="ascii")
    except OSError:
        return False


def allow_huge_pages(allowed: bool) -> None:
    """Whether memory of this process that is touched from now on may be in huge pages; no effect but on Linux.

    Processes that it starts begin with the same.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, int(not allowed), 0, 0, 0)
