"""The activation cache on disk: whole or absent, within its storage, and read back as it was written."""

import errno
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from snugfit._storage.activation_cache import ActivationCache, CacheWriter, cache_bytes
from snugfit._storage.digests import Digester
from snugfit.errors import CheckpointError, OutOfStorageError, UsageError

SHAPE = (3, 4, 5)


def rows_and_labels(rows=23, shape=SHAPE):
    torch.manual_seed(0)
    return torch.randn(rows, *shape), torch.randint(0, 10, (rows,))


def write(folder, features, labels, dtype="float32", name="block0", batch=6):
    with CacheWriter(folder, name, len(features), tuple(features.shape[1:]), dtype=dtype) as writer:
        for first in range(0, len(features), batch):
            writer.write(features[first : first + batch], labels[first : first + batch])
        return writer.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
@pytest.mark.parametrize("shape", [SHAPE, (9,)])
def test_reads_any_rows_in_any_order(tmp_path, dtype, shape):
    features, labels = rows_and_labels(shape=shape)
    written = write(tmp_path, features, labels, dtype)
    cache = ActivationCache.open(tmp_path, "block0")
    assert (cache.rows, cache.format.row_shape) == (23, shape)
    assert cache.bytes == written.bytes == cache_bytes(23, shape, dtype)
    assert cache.bytes == (tmp_path / "block0.rows").stat().st_size
    assert np.array_equal(cache.labels, labels.numpy()) and cache.labels.dtype == np.int64
    expected = cache.format.decode(cache.format.encode(features))
    for indices in ([5], [22, 0, 7, 8, 9, 3, 2, 7], list(range(23)), list(range(22, -1, -1)), []):
        assert torch.equal(cache.read(np.array(indices, dtype=np.int64)), expected[indices])


def test_float32_is_exact_and_channels_last(tmp_path):
    features, labels = rows_and_labels()
    cache = write(tmp_path, features.to(memory_format=torch.channels_last), labels)
    read = cache.read(np.arange(23))
    assert torch.equal(read, features) and read.is_contiguous(memory_format=torch.channels_last)


def test_neighbours_are_read_together(tmp_path, monkeypatch):
    features, labels = rows_and_labels()
    cache = write(tmp_path, features, labels)
    real, offsets = os.preadv, []

    def counting(fd, views, offset):
        offsets.append(offset // cache.format.row_bytes)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", counting)
    assert torch.equal(cache.read(np.array([9, 3, 8, 4, 20, 10])), features[[9, 3, 8, 4, 20, 10]])
    assert offsets == [3, 8, 20]


def test_short_reads_are_carried_on(tmp_path, monkeypatch):
    features, labels = rows_and_labels()
    cache = write(tmp_path, features, labels)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:100]], offset))
    assert torch.equal(cache.read(np.arange(23)), features)


def test_rows_outside_are_refused(tmp_path):
    cache = write(tmp_path, *rows_and_labels())
    for outside in (-1, 23):
        with pytest.raises(UsageError, match="rows 0 to 22"):
            cache.read(np.array([0, outside]))


def test_without_its_description_it_is_no_cache(tmp_path, monkeypatch):
    features, labels = rows_and_labels()
    assert ActivationCache.open(tmp_path, "block0") is None
    write(tmp_path, features, labels)
    writer = CacheWriter(tmp_path, "block0", 23, SHAPE, dtype="float16")
    writer.write(features[:10], labels[:10])
    assert (tmp_path / "block0.rows").exists()
    assert ActivationCache.open(tmp_path, "block0") is None
    cache = write(tmp_path, features, labels, "float16")
    assert torch.equal(cache.read(np.arange(23)), features.half().float())


def test_leaving_early_removes_the_file(tmp_path):
    features, labels = rows_and_labels()
    with pytest.raises(KeyboardInterrupt), CacheWriter(tmp_path, "block0", 23, SHAPE, dtype="float32") as writer:
        writer.write(features[:10], labels[:10])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_wrong_rows_are_refused(tmp_path):
    features, labels = rows_and_labels()
    with pytest.raises(UsageError, match="row 23"):
        CacheWriter(tmp_path, "block0", 22, SHAPE, dtype="float32").write(features, labels)
    writer = CacheWriter(tmp_path, "block0", 23, SHAPE, dtype="float32")
    writer.write(features[:22], labels[:22])
    with pytest.raises(UsageError, match="after 22 of its 23"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_storage_budget_is_checked_before_anything_is_written(tmp_path):
    needed = cache_bytes(1000, SHAPE, "float16")
    with pytest.raises(OutOfStorageError, match=r"needs 128.0 kB, but the storage budget has 128.0 kB left"):
        CacheWriter(tmp_path, "block0", 1000, SHAPE, dtype="float16", storage_left=needed - 1)
    assert list(tmp_path.iterdir()) == []
    CacheWriter(tmp_path, "block0", 1000, SHAPE, dtype="float16", storage_left=needed).abort()


def test_free_space_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("snugfit._storage.activation_cache.shutil.disk_usage", lambda _: SimpleNamespace(free=5000))
    with pytest.raises(OutOfStorageError, match=r"needs 5.7 kB, but .* has 5.0 kB left"):
        CacheWriter(tmp_path, "block0", 23, SHAPE, dtype="float32")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["write", "close", "fsync"])
def test_disk_full_in_the_middle_removes_the_file(tmp_path, monkeypatch, moment):
    features, labels = rows_and_labels()
    writer = CacheWriter(tmp_path, "block0", 23, SHAPE, dtype="float32")
    writer.write(features[:20], labels[:20])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if moment == "write":
        monkeypatch.setattr(Digester, "write", full)
        with pytest.raises(OutOfStorageError, match=r"block0.rows \(5.7 kB in all\)"):
            writer.write(features[20:], labels[20:])
    else:
        writer.write(features[20:], labels[20:])
        monkeypatch.setattr(*((Digester, "write") if moment == "close" else (os, "fsync")), full)
        with pytest.raises(OutOfStorageError, match=r"block0.rows \(5.7 kB in all\)"):
            writer.close()
    assert list(tmp_path.iterdir()) == []


def test_damaged_caches_are_errors(tmp_path):
    cache = write(tmp_path, *rows_and_labels())
    rows, sidecar = tmp_path / "block0.rows", tmp_path / "block0.json"
    os.truncate(rows, 1000)
    with pytest.raises(CheckpointError, match="truncated"):
        cache.read(np.arange(23))
    with pytest.raises(CheckpointError, match="1000 bytes instead of"):
        ActivationCache.open(tmp_path, "block0")
    good = json.loads(sidecar.read_text())
    for bad in ({**good, "format": 2}, {**good, "rows": 24}, {**good, "dtype": "int3"}, {}, []):
        sidecar.write_text(json.dumps(bad))
        with pytest.raises(CheckpointError, match=r"is damaged|of another format"):
            ActivationCache.open(tmp_path, "block0")
