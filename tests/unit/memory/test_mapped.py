"""Tensors in memory-mapped files: their room is used again, nothing stays behind, and a full disk is said at once."""

import errno
import os
import signal
import subprocess
import sys

import pytest
import torch

from snugfit.errors import OutOfStorageError
from snugfit.memory.scratch import MappedScratch
from snugfit.memory.tensors import tensor_peak_bytes

SHAPE, BYTES = (2, 3, 4, 5), 480


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_a_tensor_like_any_other(last, meta, tmp_path):
    made = MappedScratch(tmp_path).empty(SHAPE, torch.float64, last=last, meta=meta)
    like = torch.empty(SHAPE, dtype=torch.float64)
    like = like.to(memory_format=torch.channels_last) if last else like
    assert (made.shape, made.stride(), made.dtype, made.is_meta) == (like.shape, like.stride(), like.dtype, meta)
    if not meta:
        made.copy_(torch.arange(120, dtype=torch.float64).reshape(SHAPE))
        assert made[1, 2, 3, 4] == 119 and made.sum() == 119 * 60


def test_room_is_used_again_when_no_view_is_left(tmp_path):
    grown = []
    scratch = MappedScratch(tmp_path, grown=grown.append)
    first = scratch.empty(SHAPE, torch.float32)
    view = first.fill_(7.0)[:, 1]
    del first
    scratch.empty(SHAPE, torch.float32).zero_()
    assert grown == [BYTES, 2 * BYTES] and view.sum() == 7 * 40
    del view
    kept = [scratch.empty(SHAPE, torch.float32) for _ in range(2)]
    assert scratch.bytes == 2 * BYTES and len(kept) == 2
    del kept
    assert scratch.empty((1, *SHAPE[1:]), torch.float32).numel() == 60 and scratch.bytes == 2 * BYTES
    larger = scratch.empty((3, *SHAPE[1:]), torch.float32)
    assert larger.numel() == 180 and scratch.bytes == 3 * BYTES // 2


def test_tensors_outlive_the_scratch(tmp_path):
    made = MappedScratch(tmp_path).empty(SHAPE, torch.float32).fill_(3.0)
    assert made.sum() == 3 * 120


@pytest.mark.parametrize("meta", [False, True])
def test_no_memory_is_counted(meta, tmp_path):
    scratch = MappedScratch(tmp_path)

    def step():
        made = scratch.empty(SHAPE, torch.float32, meta=meta).zero_()
        return made[..., 1:].add_(1.0).narrow(1, 0, 2).clone()

    assert tensor_peak_bytes(step) == 2 * 2 * 4 * 4 * 4


def test_files_have_no_name(tmp_path):
    scratch = MappedScratch(tmp_path / "deep" / "folder")
    made = scratch.empty(SHAPE, torch.float32)
    assert made.numel() and list((tmp_path / "deep" / "folder").iterdir()) == []


def test_nothing_stays_behind_a_process_that_is_killed(tmp_path):
    words = (
        "import os, signal, sys, torch; from pathlib import Path; from snugfit.memory.scratch import MappedScratch;"
        "made = MappedScratch(Path(sys.argv[1])).empty((1, 1, 8, 8), torch.float32).zero_();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", words, str(tmp_path)], check=False, timeout=120)
    assert ended.returncode == -signal.SIGKILL and list(tmp_path.iterdir()) == []


def test_the_storage_budget(tmp_path):
    scratch = MappedScratch(tmp_path, limit=2 * BYTES)
    kept = [scratch.empty(SHAPE, torch.float32) for _ in range(2)]
    with pytest.raises(OutOfStorageError, match=r"--storage"):
        scratch.empty(SHAPE, torch.float32)
    assert len(kept) == 2 and scratch.bytes == 2 * BYTES
    kept.pop()
    assert scratch.empty((1, 1, 2, 3), torch.float32).numel() == 6 and scratch.bytes == BYTES + 24


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_said_at_once(number, tmp_path, monkeypatch):
    def full(descriptor, start, size):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    scratch = MappedScratch(tmp_path)
    with pytest.raises(OutOfStorageError, match=r"no space left for 5 MB of scratch in .*--cache-dir") as error:
        scratch.empty((1, 1, 1000, 1250), torch.float32)
    assert "\n" not in str(error.value) and error.value.exit_code == 6
    assert scratch.bytes == 0 and list(tmp_path.iterdir()) == []


def test_other_faults_of_the_disk_stay_what_they_are(tmp_path, monkeypatch):
    def broken(descriptor, start, size):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="broken") as error:
        MappedScratch(tmp_path).empty(SHAPE, torch.float32)
    assert not isinstance(error.value, OutOfStorageError)


def test_private_memory_does_not_grow(fresh_process, tmp_path):
    def growth():
        from pathlib import Path

        import torch

        from snugfit.memory import read_status
        from snugfit.memory.scratch import MappedScratch

        scratch = MappedScratch(Path("scratch"))
        scratch.empty((1, 1, 8, 8), torch.float32).zero_()
        before = read_status()
        kept = [scratch.empty((1, 16, 1024, 1024), torch.float32).fill_(1.0) for _ in range(2)]
        after = read_status()
        return after.anon - before.anon, sum(each.nbytes for each in kept), after.data - before.data

    anon, size, data = fresh_process(growth, folder=tmp_path)["growth"]
    assert anon < 2 << 20 and size == 1 << 27 and data < 2 << 20
