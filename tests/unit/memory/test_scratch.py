"""Tensors in a scratch file."""

import errno
import os

import pytest
import torch

from snugfit.errors import OutOfStorageError
from snugfit.memory.scratch import ScratchFile, StoredTensor, stored_bytes
from snugfit.memory.tensors import tensor_peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_tensors_come_back_as_they_were_and_do_not_overlap(dtype, tmp_path):
    shapes = [(3, 5), (7,), (), (2, 3, 4, 5), (0, 4)]
    tensors = [(torch.rand(shape) * 100).to(dtype) for shape in shapes]
    with ScratchFile(tmp_path / "deep" / "scratch", sum(stored_bytes(shape, dtype) for shape in shapes)) as scratch:
        stored = [scratch.store(tensor) for tensor in tensors]
        for tensor, one in zip(tensors, stored, strict=True):
            found = one.read()
            assert found.dtype == dtype and found.shape == tensor.shape and torch.equal(found, tensor)
    assert not (tmp_path / "deep" / "scratch").exists()


def test_rows_are_read_and_written_apart(tmp_path):
    with ScratchFile(tmp_path / "scratch", stored_bytes((6, 2, 3))) as scratch:
        stored = scratch.reserve((6, 2, 3))
        values = torch.arange(36.0).view(6, 2, 3)
        stored.write(values[4:], 4)
        stored.write(values[:4])
        assert torch.equal(stored.read(slice(3, 5)), values[3:5])
        assert torch.equal(stored.read(slice(5, 9)), values[5:]), "what lies beyond the end is left out"
        assert torch.equal(stored.read(), values)


def test_any_memory_layout_can_be_stored(tmp_path):
    image = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    turned = torch.rand(4, 6).t()
    with ScratchFile(tmp_path / "scratch", stored_bytes(image.shape) + stored_bytes(turned.shape)) as scratch:
        assert torch.equal(scratch.store(image).read(), image)
        assert torch.equal(scratch.store(turned).read(), turned)


def test_images_and_weights_in_channels_last_come_back_in_channels_last(tmp_path):
    weight = torch.rand(6, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    with ScratchFile(tmp_path / "scratch", stored_bytes(weight.shape)) as scratch:
        stored = scratch.store(weight)
        stored.write(-weight[2:4].contiguous(), 2)
        for rows, expected in ((slice(None), weight[:2]), (slice(2), weight[:2]), (slice(2, 4), -weight[2:4])):
            found = stored.read(rows)
            assert found.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(found[:2], expected)


def test_neither_storing_nor_reading_copies_a_weight(tmp_path):
    weight = torch.rand(64, 32, 3, 3).contiguous(memory_format=torch.channels_last)
    with ScratchFile(tmp_path / "scratch", weight.nbytes) as scratch:
        assert tensor_peak_bytes(lambda: scratch.store(weight), [weight]) == weight.nbytes
        stored = StoredTensor(tuple(weight.shape), weight.dtype, True, scratch._descriptor, 0)
        assert tensor_peak_bytes(stored.read, [weight]) == 2 * weight.nbytes


def test_a_parameter_is_stored_without_its_history(tmp_path):
    parameter = torch.nn.Parameter(torch.rand(3))
    with ScratchFile(tmp_path / "scratch", 12) as scratch:
        assert not scratch.store(parameter).read().requires_grad


def test_storing_too_much_is_an_error_and_takes_nothing(tmp_path):
    with ScratchFile(tmp_path / "scratch", 100) as scratch:
        scratch.reserve((16,))
        with pytest.raises(ValueError, match="no space for 40 more bytes"):
            scratch.reserve((10,))
        scratch.reserve((9,))


def test_the_file_goes_on_errors_too(tmp_path):
    with pytest.raises(KeyError), ScratchFile(tmp_path / "scratch", 64):
        raise KeyError("other")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_said_at_once(number, tmp_path, monkeypatch):
    def full(descriptor, start, size):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfStorageError, match=r"no space left for 5 MB of scratch in .*--cache-dir") as error:
        ScratchFile(tmp_path / "scratch", 5_000_000).__enter__()
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_other_faults_of_the_disk_stay_what_they_are(tmp_path, monkeypatch):
    def broken(descriptor, start, size):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="broken") as error:
        ScratchFile(tmp_path / "scratch", 64).__enter__()
    assert not isinstance(error.value, OutOfStorageError)
    assert list(tmp_path.iterdir()) == []


def test_neither_the_process_nor_its_high_water_mark_grows(fresh_process, tmp_path):
    def growth():
        from pathlib import Path

        import torch

        from snugfit.memory import read_status
        from snugfit.memory.process import reset_high_water
        from snugfit.memory.scratch import ScratchFile

        part = torch.ones(1 << 18)
        with ScratchFile(Path("scratch"), 64 << 20) as scratch:
            scratch.store(part).read()
            reset_high_water()
            before = read_status()
            for _ in range(63):
                scratch.store(part)
            after = read_status()
        return after.anon - before.anon, after.high_water - before.high_water

    anon, high_water = fresh_process(growth, folder=tmp_path)["growth"]
    assert anon < 2 << 20 and high_water < 4 << 20
