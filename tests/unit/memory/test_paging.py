"""Bytes that leave memory for a file and come back."""

import errno
import gc
import math
import os
import random
import resource
import threading
import time
from pathlib import Path

import pytest

from snugfit.errors import OutOfStorageError
from snugfit.memory import paging
from snugfit.memory.paging import BLOCK_BYTES, BLOCKS, PageFile, disk_speed


def random_bytes(size, seed=0):
    return memoryview(random.Random(seed).randbytes(size))


def read(file, page):
    found = bytearray(page.size)
    file.read(page, memoryview(found))
    return found


DESCRIPTORS = Path("/proc/self/fd")
SIZES = [1, 1000, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, (BLOCKS + 2) * BLOCK_BYTES + 7, 5]


ORDERS = {"backward": range(6, -1, -1), "forward": range(7), "mixed": (3, 6, 0, 5, 1, 4, 2)}


@pytest.mark.parametrize("order", ORDERS)
def test_pages_come_back_as_they_were_in_any_order(order, tmp_path):
    file = PageFile(tmp_path / "deep")
    for step in range(3):
        values = [random_bytes(size, seed=step * 10 + at) for at, size in enumerate(SIZES)]
        pages = [file.write(value) for value in values]
        file.read_ahead()
        order_of = {
            "backward": reversed,
            "forward": list,
            "mixed": lambda all_: random.Random(1).sample(all_, len(all_)),
        }
        for at in order_of[order](list(range(len(SIZES)))):
            assert read(file, pages[at]) == values[at], at
            pages[at] = None
    assert file.bytes == sum(SIZES), "the space of one step serves the next"


def test_pages_that_are_dropped_unread_do_not_disturb_later_ones(tmp_path):
    file = PageFile(tmp_path)
    for step in range(4):
        pages = [file.write(random_bytes(size, seed=step)) for size in SIZES]
        file.read_ahead()
        last = pages.pop()
        assert read(file, last) == random_bytes(SIZES[-1], seed=step)
        del pages, last
    assert file.bytes == sum(SIZES)


def test_the_space_of_pages_in_use_is_not_given_away(tmp_path):
    file = PageFile(tmp_path)
    first, second, third = (file.write(random_bytes(100, seed=at)) for at in range(3))
    del second
    fourth = file.write(random_bytes(100, seed=4))
    assert [read(file, page) for page in (fourth, third, first)] == [random_bytes(100, seed=at) for at in (4, 2, 0)]


def test_memory_is_that_of_the_blocks(tmp_path, monkeypatch):
    """A slow disk keeps the writer waiting; it does not keep copies in memory."""
    slow = paging._write

    def write(descriptor, data, offset):
        time.sleep(0.01)
        slow(descriptor, data, offset)

    monkeypatch.setattr(paging, "_write", write)
    file = PageFile(tmp_path)
    value = random_bytes(20 * BLOCK_BYTES)
    started = time.perf_counter()
    page = file.write(value)
    assert time.perf_counter() - started > 0.01 * (20 - BLOCKS)
    assert len(file._blocks) == BLOCKS and all(len(block.data) == BLOCK_BYTES for block in file._blocks)
    assert read(file, page) == value


def test_nothing_stays_behind(tmp_path):
    gc.collect()
    threads, descriptors = set(threading.enumerate()), len(list(DESCRIPTORS.iterdir()))
    file = PageFile(tmp_path)
    page = file.write(random_bytes(1000))
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    del file, page
    gc.collect()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads
    assert len(list(DESCRIPTORS.iterdir())) <= descriptors, "those of earlier tests may close meanwhile"


def test_an_unused_file_is_not_created(tmp_path):
    PageFile(tmp_path / "none").read_ahead()
    assert not (tmp_path / "none").exists()


def test_the_storage_budget_holds(tmp_path):
    grown = []
    file = PageFile(tmp_path, limit=3_000_000, grown=grown.append)
    page = file.write(random_bytes(2_000_000))
    with pytest.raises(OutOfStorageError, match=r"need 4 MB, but the storage budget has 3 MB.*--activations exact"):
        file.write(random_bytes(2_000_000))
    assert grown == [2_000_000] and read(file, page) == random_bytes(2_000_000)


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = PageFile(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        page = file.write(random_bytes(90_000))
        with pytest.raises(OutOfStorageError, match=r"no space left for 0 MB of scratch in .*--activations exact"):
            file.write(random_bytes(20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read(file, page) == random_bytes(90_000)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_in_the_background_is_raised_before_bytes_are_believed(number, tmp_path, monkeypatch):
    def broken(descriptor, data, offset):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(paging, "_write", broken)
    file = PageFile(tmp_path)
    page = file.write(random_bytes(1000))
    kind = OutOfStorageError if number == errno.ENOSPC else OSError
    with pytest.raises(kind):
        read(file, page)
    with pytest.raises(kind):
        file.write(random_bytes(BLOCKS * BLOCK_BYTES))


def test_the_speed_of_a_disk_is_that_at_which_it_moves_bytes(tmp_path, monkeypatch):
    """A disk that takes 20 ms for each of 64 blocks, in both directions, moves 13 MB/s."""
    for name in ("pwrite", "preadv"):
        move = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments, _move=move: time.sleep(0.02) or _move(*arguments))
    true = BLOCK_BYTES / 0.02
    speed = disk_speed(tmp_path / "deep")
    assert true / 2 < speed < 1.5 * true and speed == 2 ** round(math.log2(speed))
    assert not list((tmp_path / "deep").iterdir()), "nothing stays behind"


def test_a_full_disk_has_no_speed(tmp_path, monkeypatch):
    def full(descriptor, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfStorageError, match="no space left"):
        disk_speed(tmp_path)
