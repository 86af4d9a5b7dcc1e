"""Bytes that leave memory for a file in the background, and come back in reverse order.

Data passes through blocks of fixed size, in both directions. So the memory of a step does not depend on the speed of
the disk: written memory is free at once, and only blocks are read ahead. The file is written and read, not mapped,
because mapped pages would count twice, and the kernel is advised to drop its copies.
"""

from __future__ import annotations

import errno
import math
import os
import queue
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from snugfit._core.own_cores import leave_own_core
from snugfit.memory.scratch import over_limit, reserve_space, storage_error

BLOCK_BYTES = 1 << 18
BLOCKS = 8
"""Memory of a page file: blocks between a step and the disk."""
_ALTERNATIVE = "--activations exact"
_DIRTY_BYTES = 8 << 20
"""Bytes behind the last write that the kernel may still hold."""
_MEASURED_BYTES = 16 << 20


def disk_speed(folder: Path) -> float:
    """Bytes per second at which the disk of a folder writes and reads a small file; the nearest power of two.

    Measured seconds differ from one process to the next; rounded, they rarely lead to another choice.

    Raises:
        OutOfStorageError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = memoryview(bytearray(os.urandom(BLOCK_BYTES)))
    with tempfile.TemporaryFile(dir=folder) as file:
        reserve_space(file.fileno(), 0, _MEASURED_BYTES, folder, _ALTERNATIVE)
        begun = time.perf_counter()
        for move in (_write, _read):
            for start in range(0, _MEASURED_BYTES, BLOCK_BYTES):
                move(file.fileno(), data, start)
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        seconds = time.perf_counter() - begun
    return float(2 ** round(math.log2(2 * _MEASURED_BYTES / seconds)))


@dataclass(eq=False)
class Page:
    """Bytes in a page file, until nothing refers to it."""

    offset: int
    size: int
    is_read: bool = False

    @property
    def parts(self) -> Iterator[tuple[int, int]]:
        """Start and length of each part that fits a block."""
        return ((start, min(BLOCK_BYTES, self.size - start)) for start in range(0, self.size, BLOCK_BYTES))


@dataclass(eq=False)
class _Block:
    """Memory of a block, and the part that was read ahead into it: its page and start."""

    data: memoryview = field(default_factory=lambda: memoryview(bytearray(BLOCK_BYTES)))
    page: weakref.ref[Page] | None = None
    start: int = 0
    idle: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    def holds(self, page: Page, start: int) -> bool:
        """Whether a part of a page was, or is being, read into it."""
        return self.page is not None and self.page() is page and self.start == start

    @property
    def is_free(self) -> bool:
        """Whether it holds no part of a page that is still needed."""
        return self.page is None or self.page() is None


_Transfer = Callable[[int, memoryview, int], None]
"""Moves bytes between memory and a file, by descriptor and offset."""
_Job = tuple[_Transfer, _Block, int, int]


class PageFile:
    """An unnamed file that holds what does not fit in memory. It is created when something is written.

    Space is given to pages like a stack: that of the last page is used again once nothing refers to it. Nothing is left
    behind, however the process ends.

    Args:
        folder: created if missing. A folder in memory (tmpfs) saves nothing.
        limit: most bytes on disk; the disk's size by default.
        grown: called with the bytes on disk whenever they grow.

    Attributes:
        bytes: on disk.
    """

    def __init__(self, folder: Path, limit: int | None = None, grown: Callable[[int], None] | None = None) -> None:
        self.folder, self.limit, self.grown, self.bytes = folder, limit, grown, 0
        self._opened: int | None = None
        self._failed: list[OSError] = []
        self._pages: list[weakref.ref[Page]] = []
        self._blocks: list[_Block] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def write(self, data: memoryview) -> Page:
        """Copy bytes (N,), which are then written in the background.

        Raises:
            OutOfStorageError: the disk is full, or the limit is reached.
            OSError: an earlier write failed.
        """
        page = self._new_page(len(data))
        for block in self._blocks:
            block.page = None
        for start, size in page.parts:
            block = self._free_block()
            block.data[:size] = data[start : start + size]
            self._submit(_write, block, page.offset + start, size)
        return page

    def read(self, page: Page, into: memoryview) -> None:
        """Fill ``into`` (N,) with the bytes of a page, and begin to read the pages that were written before it.

        Raises:
            OSError: reading, or an earlier write, failed.
        """
        page.is_read = True
        for start, size in page.parts:
            block = next((each for each in self._blocks if each.holds(page, start)), None)
            if block is None:
                block = self._free_block()
                self._submit(_read, block, page.offset + start, size)
            self._wait(block)
            into[start : start + size] = block.data[:size]
            block.page = None
            self.read_ahead(page, start + size)

    def read_ahead(self, page: Page | None = None, start: int = 0) -> None:
        """Read into free blocks what is needed next: the rest of ``page`` from ``start`` on, then unread pages."""
        parts = [(page, at, size) for at, size in page.parts if at >= start] if page is not None else []
        for each, at, size in (*parts, *self._unread()):
            if any(block.holds(each, at) for block in self._blocks):
                continue
            block = next((block for block in self._blocks if block.is_free and block.idle.is_set()), None)
            if block is None:
                return
            block.page, block.start = weakref.ref(each), at
            self._submit(_read, block, each.offset + at, size)

    def _unread(self) -> Iterator[tuple[Page, int, int]]:
        """Parts of pages that were not read, the last page first."""
        for reference in reversed(self._pages):
            page = reference()
            if page is not None and not page.is_read:
                yield from ((page, start, size) for start, size in page.parts)

    def _new_page(self, size: int) -> Page:
        """Space for a page after the last one that is still needed."""
        while self._pages and self._pages[-1]() is None:
            self._pages.pop()
        last = self._pages[-1]() if self._pages else None
        page = Page(0 if last is None else last.offset + last.size, size)
        self._reserve(page.offset + size)
        self._pages.append(weakref.ref(page))
        return page

    def _reserve(self, size: int) -> None:
        """Reserve the file's space in advance, because a write in the background cannot be refused."""
        if size <= self.bytes:
            return
        if self.limit is not None and size > self.limit:
            raise over_limit(size, self.limit, _ALTERNATIVE)
        reserve_space(self._descriptor(), self.bytes, size - self.bytes, self.folder, _ALTERNATIVE)
        self.bytes = size
        if self.grown is not None:
            self.grown(size)

    def _descriptor(self) -> int:
        if self._opened is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._blocks = [_Block() for _ in range(BLOCKS)]
            with tempfile.TemporaryFile(dir=self.folder) as file:
                descriptor = os.dup(file.fileno())
                threading.Thread(target=_work, args=(descriptor, self._jobs, self._failed), daemon=True).start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
            self._opened = descriptor
        return self._opened

    def _free_block(self) -> _Block:
        """The block that has been free for longest, once it is idle; the last one, if none is free."""
        block = next((each for each in self._blocks if each.is_free), self._blocks[-1])
        self._wait(block)
        block.page = None
        return block

    def _submit(self, run: _Transfer, block: _Block, offset: int, size: int) -> None:
        self._blocks.remove(block)
        self._blocks.append(block)
        block.idle.clear()
        self._jobs.put((run, block, offset, size))

    def _wait(self, block: _Block) -> None:
        """Wait until a block is idle; raises the first error of the background, also of other blocks."""
        block.idle.wait()
        if self._failed:
            raise storage_error(self._failed[0], self.bytes, self.folder, _ALTERNATIVE) from self._failed[0]


def _work(descriptor: int, jobs: queue.SimpleQueue[_Job | None], failed: list[OSError]) -> None:
    """Run jobs one after another until there is None; then close the file."""
    leave_own_core()
    while (job := jobs.get()) is not None:
        run, block, offset, size = job
        try:
            run(descriptor, block.data[:size], offset)
        except OSError as error:
            failed.append(error)
        block.idle.set()
        del job, block  # memory of a file that nobody refers to is free
    os.close(descriptor)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
    behind = max(offset - _DIRTY_BYTES, 0)  # the first advice starts writing, a later one drops what is written
    os.posix_fadvise(descriptor, behind, offset + len(data) - behind, os.POSIX_FADV_DONTNEED)


def _read(descriptor: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the scratch file is shorter than it was")
        done += count
    os.posix_fadvise(descriptor, offset, len(into), os.POSIX_FADV_DONTNEED)
