"""Photos that are decoded once: the same pixels, whatever the disk has room for."""

import errno
import os

import numpy as np
import pytest
import torch

import snugfit
from snugfit._data import Batches, Decoder, Transform, decoded, load
from snugfit._data.decoded import DecodedFile, space_for_pixels
from snugfit._data.sets import Bordered

IMAGE = 3 * 16 * 16


@pytest.fixture
def counted(monkeypatch):
    """The names of the files that are decoded."""
    seen, decode = [], Decoder.__call__

    def call(self, paths):
        seen.extend(map(str, paths))
        return decode(self, paths)

    monkeypatch.setattr(Decoder, "__call__", call)
    return seen


@pytest.fixture
def photos(write_folder):
    """20 training images."""
    return load(f"folder:{write_folder(parts=('train', 'val', 'test'))}", image_size=16)


def epochs(images, count=3):
    batches = Batches(images, Transform((0.5,) * 3, (0.2,) * 3, True), seed=2, augment=True)
    return [batch for epoch in range(count) for batch, _ in batches.epoch(epoch, 6, parts=2)]


@pytest.mark.parametrize("room", [0, 1, 7, 20, 1000])
def test_pixels_are_the_same_and_decoded_once_as_far_as_there_is_room(photos, counted, tmp_path, room):
    expected, sizes = epochs(photos.train), []
    before = len(counted)
    counted.clear()
    photos.train.keep_decoded(DecodedFile(tmp_path / "cache", room * IMAGE + 5, sizes.append))
    found = epochs(photos.train)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    read = len(set(counted))
    assert max(sizes) == min(room, read) * IMAGE
    if room >= read:
        assert len(counted) == read == 20
    assert len(counted) <= before and not (tmp_path / "cache").exists(), "the file has no name"


@pytest.mark.parametrize("failure", ["error", "part"])
def test_a_full_disk_only_ends_the_keeping(photos, counted, tmp_path, monkeypatch, failure):
    expected = epochs(photos.train)
    written = []

    def write(descriptor, data, place):
        if len(written) == 4:
            if failure == "part":
                return len(data) // 2
            raise OSError(errno.ENOSPC, "no space left")
        written.append(place)
        return real(descriptor, data, place)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", write)
    file = DecodedFile(tmp_path, 10**9)
    photos.train.keep_decoded(file)
    assert all(torch.equal(one, other) for one, other in zip(expected, epochs(photos.train), strict=True))
    assert written == [0, IMAGE, 2 * IMAGE, 3 * IMAGE] and file.most_bytes == 4 * IMAGE


def test_nothing_is_kept_where_no_file_can_be_made(photos, tmp_path):
    (tmp_path / "file").write_text("")
    photos.train.keep_decoded(DecodedFile(tmp_path / "file" / "cache", 10**9))
    assert torch.equal(photos.train.images(np.arange(5)), photos.train.images(np.arange(5)))


def test_other_errors_of_the_disk_are_raised(photos, tmp_path, monkeypatch):
    photos.train.keep_decoded(DecodedFile(tmp_path, 10**9))
    photos.train.images(np.arange(20))
    monkeypatch.setattr(os, "preadv", lambda *arguments: 5)
    with pytest.raises(OSError, match="could not be read back"):
        photos.train.images(np.arange(3))
    monkeypatch.setattr(os, "pwrite", lambda *arguments: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    photos.val.keep_decoded(DecodedFile(tmp_path, 10**9))
    with pytest.raises(OSError, match="broken"):
        photos.val.images(np.arange(1))


def test_parts_and_borders_of_a_set_keep_its_images(write_folder, counted, tmp_path):
    splits = load(f"folder:{write_folder(count=20)}", image_size=16)
    bordered, file = Bordered(splits.train, 2), DecodedFile(tmp_path, 10**9)
    bordered.keep_decoded(file)
    expected = bordered.images(np.arange(8))
    counted.clear()
    assert torch.equal(bordered.images(np.arange(8)), expected) and not counted


def test_sets_that_are_not_decoded_keep_nothing(tmp_path):
    splits = load("digits", image_size=16)
    splits.train.keep_decoded(DecodedFile(tmp_path / "cache", 10**9))
    splits.train.images(np.arange(3))
    assert not (tmp_path / "cache").exists()


def test_room_is_what_a_budget_or_a_tenth_of_the_disk_leaves(tmp_path, monkeypatch):
    nowhere = tmp_path / "not" / "yet"
    assert space_for_pixels(nowhere, 500, 200) == 300 and space_for_pixels(nowhere, 100, 200) == 0
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert 0.05 * free < space_for_pixels(nowhere, None, 10) < 0.15 * free
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nnone {tmp_path} tmpfs rw 0 0\n\nodd\n")
    monkeypatch.setattr(decoded, "_MOUNTS", mounts)
    assert space_for_pixels(nowhere, 500, 200) == 0, "files there take memory"
    mounts.write_text(f"none / tmpfs rw 0 0\ndisk {tmp_path} ext4 rw 0 0\n")
    assert space_for_pixels(nowhere, 500, 200) == 300


@pytest.mark.parametrize("strategy", ["backprop", "blockwise"])
def test_a_run_decodes_each_photo_once_and_ends_with_the_same_weights(write_folder, counted, tmp_path, strategy):
    folder = write_folder(parts=("train", "val", "test"))
    options = {"strategy": strategy, "image_size": 16, "epochs": 3, "batch_size": 8, "threads": 1, "memory": "200MB"}
    weights, decodings = [], []
    for storage in ("1kB", "2GB"):
        plan = snugfit.plan("smallconv", f"folder:{folder}", storage=storage, **options)
        counted.clear()
        record = plan.run((), out=tmp_path / storage)
        weights.append(record.model.state_dict())
        decodings.append(len(counted))
        assert record.measured["decoded_bytes"] + record.measured["storage_bytes"] <= record.budget["storage_bytes"]
        assert record.measured["peak_bytes"] <= record.predicted["peak_bytes"]
    assert record.measured["decoded_bytes"] == 40 * IMAGE
    assert decodings[0] > 100 and decodings[1] == 60, "training and validation photos once, and each test photo"
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert not list((tmp_path / "2GB").rglob("tmp*"))
    assert not (tmp_path / "2GB" / "cache").exists()
