"""Rows of files: as numpy maps them, and refused where a file is cut short while it is in use."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from snugfit._data.small_images import CIFAR10, DIGITS, Records, read_cifar, read_mnist
from snugfit.errors import DataError


@pytest.mark.parametrize("shape", [(7, 3), (5, 2, 3), (9,), (300, 4000)])
def test_rows_and_columns_are_those_of_the_array(tmp_path, shape):
    data = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    (tmp_path / "x").write_bytes(b"head" + data.tobytes())
    records = Records(tmp_path / "x", 4, shape)
    indices = np.array([4, 0, 4, 2])
    assert len(records) == shape[0] and (records.rows(indices) == data[indices]).all()
    flat = data.reshape(shape[0], -1)
    for first, last in ((0, 1), (0, flat.shape[1]), (flat.shape[1] - 1, flat.shape[1])):
        assert (records.columns(first, last) == flat[:, first:last]).all()


def write_mnist(folder: Path, packed: bool) -> None:
    for prefix, count in (("train", 40), ("t10k", 20)):
        head = [b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28)), b"\0\0\x08\x01"]
        head[1] += count.to_bytes(4, "big")
        body = [bytes(range(200)) * (count * 784 // 200 + 1), bytes(range(10)) * (count // 10)]
        for kind, begin, data in zip(("images-idx3", "labels-idx1"), head, body, strict=True):
            content = begin + (data[: count * 784] if "images" in kind else data)
            name = f"{prefix}-{kind}-ubyte" + (".gz" if packed else "")
            (folder / name).write_bytes(gzip.compress(content) if packed else content)


def write_cifar(folder: Path) -> None:
    for name in (*CIFAR10.train, CIFAR10.test):
        (folder / name).write_bytes(b"".join(bytes([label]) + bytes([label]) * 3072 for label in range(10)))


def test_an_idx_file_that_is_cut_short_while_it_is_in_use_is_named(tmp_path):
    write_mnist(tmp_path, packed=False)
    images = read_mnist(DIGITS, tmp_path, 32).train
    assert images.images(np.arange(40)).shape == (40, 1, 32, 32)
    path = tmp_path / "train-images-idx3-ubyte"
    os.truncate(path, 16 + 784 * 30 + 100)
    assert images.images(np.arange(30)).shape[0] == 30
    with pytest.raises(DataError, match=f"{path} was truncated to 23,636 bytes while it was in use"):
        images.images(np.arange(40))


CUT = """
import os, sys
from pathlib import Path
import numpy as np
from snugfit._data.small_images import CIFAR10, read_cifar
from snugfit.errors import DataError
images = read_cifar(CIFAR10, Path(sys.argv[1]), 32).train
os.truncate(Path(sys.argv[1], "data_batch_3.bin"), 5000)
try:
    images.images(np.arange(50))
except DataError as error:
    print(error.exit_code, error)
"""


def test_a_cifar_file_that_is_cut_short_does_not_end_the_process(tmp_path):
    """It ended by SIGBUS when the files were mapped."""
    write_cifar(tmp_path)
    done = subprocess.run([sys.executable, "-c", CUT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    path = tmp_path / "data_batch_3.bin"
    assert done.stdout.startswith(f"4 {path} was truncated to 5,000 bytes while it was in use")


@pytest.mark.parametrize("packed", [False, True])
def test_no_file_of_the_users_is_mapped(tmp_path, packed):
    write_mnist(tmp_path, packed)
    write_cifar(tmp_path)
    kept = [read_mnist(DIGITS, tmp_path, 32), read_cifar(CIFAR10, tmp_path, 32)]
    for parts in kept:
        parts.train.images(np.arange(20))
    mapped = Path("/proc/self/maps")
    if not mapped.exists():
        pytest.skip("needs /proc/self/maps")
    assert not [line for line in mapped.read_text().splitlines() if str(tmp_path) in line or "ubyte" in line]
