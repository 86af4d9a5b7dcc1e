"""What the allocators of the process keep: glibc's heap and MKL's buffers.

MKL keeps the buffers of its matrix products, 6 MB after ResNet-18's convolutions of one sample in one thread. The
package disables that (``MKL_DISABLE_FAST_MM``), without loss of speed. If torch was loaded earlier, MKL has already
read that variable, and its buffers are freed with the rest.

The process has no transparent huge pages, even where the system uses them for all memory: the first byte written in one
makes all of it resident, 2 MiB on most machines, so that peaks are hard to predict. Steps that find their memory mapped
gain nothing from them.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_MAPPED_BLOCKS = 65536
"""Most blocks that glibc maps by themselves at a time, by default."""
_IS_MAPPED = 2
"""Bit of the size that glibc writes before a block: the block is a mapping of its own."""
_LARGEST_HELD_BYTES = 2**28
_PR_SET_THP_DISABLE = 41
MMAP_THRESHOLD_BYTES = 64 * 1024

_held: list[int] = []
"""Addresses of the blocks that :func:`hold_free_blocks` has allocated."""


@cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        return None
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    return libc


def set_allocator() -> bool:
    """Serve large blocks by mmap and return freed ones at once (glibc only).

    With glibc's defaults real peaks were 28-70 % above tensor bytes; with these thresholds and channels_last 2-9 %.
    There is one arena, because every further one keeps freed memory of its own, and no huge page.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    libc = _libc()
    if libc is None or not set_thresholds(MMAP_THRESHOLD_BYTES):
        return False
    hold_free_blocks()
    return bool(libc.mallopt(_M_ARENA_MAX, 1) == 1)


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


def map_large_blocks(maps: bool) -> None:
    """Whether blocks above the threshold are mapped by themselves; otherwise the heap serves them, and keeps them."""
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_MAX, _MAPPED_BLOCKS if maps else 0)


def trim_heap() -> None:
    """Free MKL's buffers and the free pages of the heap; small blocks that still live limit how far it shrinks."""
    mkl = _mkl()
    if mkl is not None:
        mkl.mkl_serv_free_buffers()
    trim_free_pages()


def trim_free_pages() -> None:
    """Return the free pages of the heap to the system."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def hold_free_blocks() -> None:
    """Trim the heap, and allocate the large free blocks that are left in it, so that no tensor uses them.

    One small block that lives at its end keeps a heap from shrinking. glibc serves a tensor from such a heap before it
    maps one, and what is freed there stays resident: peaks were up to 24 MB above those of a new process, and 8 MB
    above the predicted ones. The held blocks themselves are not resident. Call it only with the thresholds of
    :func:`set_allocator`: with glibc's own, which grow, the search for free blocks would raise them. Large blocks are
    mapped from then on, or the heap would grow until none is refused.
    """
    map_large_blocks(True)
    free_held_blocks()
    trim_heap()
    libc, size = _libc(), _LARGEST_HELD_BYTES
    while libc is not None and size >= MMAP_THRESHOLD_BYTES:
        block = libc.malloc(size)
        if block is not None and not _is_mapped(block):
            _held.append(block)
        else:
            libc.free(block)
            size //= 2


def free_held_blocks() -> None:
    """Let the heap use again what :func:`hold_free_blocks` holds."""
    libc = _libc()
    while libc is not None and _held:
        libc.free(_held.pop())


def _is_mapped(block: int) -> bool:
    word = ctypes.sizeof(ctypes.c_size_t)
    return bool(ctypes.c_size_t.from_address(block - word).value & _IS_MAPPED)


@cache
def _mkl() -> ctypes.CDLL | None:
    """The library with torch's MKL; None if torch is built without it."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(path)) if path.exists() else None
    return library if hasattr(library, "mkl_serv_free_buffers") else None
