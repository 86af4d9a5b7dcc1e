"""How much of the mapped files a piece of work reads."""

from __future__ import annotations

import mmap

import pytest

from snugfit.memory import process
from snugfit.memory.process import touched_file_bytes

MIB = 2**20


@pytest.fixture
def mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (32 * MIB // 256))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as found:
        assert found[::4096].count(0) == 8192, "every page is resident"
        yield found


def least(work):
    """The smallest of three readings: other threads of the tests' process may read library code meanwhile."""
    return min(touched_file_bytes(work) for _ in range(3))


def test_pages_that_are_read_count_and_resident_ones_that_are_not_do_not(mapped):
    nothing = least(lambda: None)
    half = least(lambda: mapped[: 16 * MIB : 4096])
    assert nothing < 4 * MIB
    assert 16 * MIB <= half < 20 * MIB


def test_private_pages_do_not_count():
    private = bytearray(16 * MIB)
    assert least(lambda: private.find(b"x")) < 4 * MIB


def test_pages_of_a_file_that_the_process_changed_do_not_count(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(16 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as copied:

        def change() -> None:
            for at in range(0, 16 * MIB, 4096):
                copied[at] = 1

        assert least(change) < 4 * MIB


@pytest.mark.parametrize("name", ["_CLEAR_REFS", "_MAPPINGS"])
def test_a_kernel_that_does_not_tell(name, tmp_path, monkeypatch):
    monkeypatch.setattr(process, name, tmp_path / "missing")
    assert touched_file_bytes(lambda: None) is None
