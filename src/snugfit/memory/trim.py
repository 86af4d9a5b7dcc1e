"""Allocators: return freed memory to the system at once, so that the process holds only what its tensors need.

MKL keeps the buffers of its matrix products, 6 MB after ResNet-18's convolutions of one sample in one thread. The
package disables that (``MKL_DISABLE_FAST_MM``), without loss of speed. If torch was loaded earlier, MKL has already
read that variable, and its buffers are freed with the rest.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from functools import cache
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
MMAP_THRESHOLD_BYTES = 64 * 1024


def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def tighten_allocator() -> bool:
    """Serve large blocks by mmap and return freed ones at once (glibc only).

    With glibc's defaults real peaks were 28-70 % above tensor bytes; with these thresholds and channels_last 2-9 %.
    There is one arena, because every further one keeps freed memory of its own.
    """
    libc = _libc()
    if libc is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), (_M_TRIM_THRESHOLD, MMAP_THRESHOLD_BYTES), (_M_ARENA_MAX, 1))
    return all([libc.mallopt(option, value) == 1 for option, value in settings])


def release_memory() -> None:
    """Collect garbage (without it nothing is freed after an out-of-memory error) and trim the heap.

    Call it after the ``except`` clause of an error, which keeps the error alive. Autograd keeps the last error of a
    backward pass, and through its traceback parameters and gradients, until another pass succeeds; so one is run.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros(1, requires_grad=True).sum().backward()
    gc.collect()
    trim_heap()


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
