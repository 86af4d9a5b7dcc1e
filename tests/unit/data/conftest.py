"""Tiny data sets in their original formats."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from PIL import Image
from tiny_coco import write_release


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch, request):
    """Keep the user's caches and data out of the tests (real data only where a test is marked so)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not request.node.get_closest_marker("data"):
        monkeypatch.delenv("SNUGFIT_DATA", raising=False)


@pytest.fixture
def write_cifar(tmp_path):
    """Write a CIFAR with ``per_file`` records per file; returns its data folder and all (labels, pixels) by file."""

    def write(classes=10, per_file=20):
        hundred = classes == 100
        folder = tmp_path / "sets" / ("cifar-100-binary" if hundred else "cifar-10-batches-bin")
        folder.mkdir(parents=True)
        files = ["train.bin", "test.bin"] if hundred else [f"data_batch_{i}.bin" for i in range(1, 6)]
        files += [] if hundred else ["test_batch.bin"]
        rng, written = np.random.default_rng(0), {}
        for name in files:
            labels = (np.arange(per_file) % classes).astype(np.uint8)
            pixels = rng.integers(0, 256, (per_file, 3, 32, 32), dtype=np.uint8)
            head = np.stack([labels // 5, labels], 1) if hundred else labels[:, None]
            np.hstack([head, pixels.reshape(per_file, -1)]).tofile(folder / name)
            written[name] = labels, pixels
        (folder / ("fine_label_names.txt" if hundred else "batches.meta.txt")).write_text(
            "".join(f"class{i}\n" for i in range(classes)) + "\n"
        )
        if hundred:
            (folder / "coarse_label_names.txt").write_text("".join(f"super{i}\n" for i in range(20)))
        return folder.parent, written

    return write


@pytest.fixture
def write_idx(tmp_path):
    """Write an MNIST-like data set; returns its data folder and the training (pixels, labels)."""

    def write(folder_name="mnist", compress=True, count=40):
        folder = tmp_path / "sets" / folder_name
        folder.mkdir(parents=True)
        rng, train = np.random.default_rng(0), None
        for prefix in ("train", "t10k"):
            pixels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = (np.arange(count) % 10).astype(np.uint8)
            train = train or (pixels, labels)
            for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
                header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
                opened = gzip.open if compress else open
                name = f"{prefix}-{kind}-ubyte" + (".gz" if compress else "")
                with opened(folder / name, "wb") as file:
                    file.write(header + array.tobytes())
        return folder.parent, train

    return write


@pytest.fixture
def write_folder(tmp_path):
    """Write class folders of plain images, whose colour tells the class; ``parts`` as sub-folders."""

    def write(parts=("",), classes=("ants", "bees"), count=10, size=(40, 30), extension="jpg"):
        root = tmp_path / "photos"
        for part in parts:
            for label, name in enumerate(classes):
                folder = root / part / name
                folder.mkdir(parents=True)
                for i in range(count):
                    Image.new("RGB", size, (60 * label, 20 * i % 256, 200)).save(folder / f"{i:03d}.{extension}")
        return root

    return write


@pytest.fixture
def write_coco(tmp_path):
    """Write a release of COCO with a dozen images; returns its folder."""

    def write(year=2014, **json_options):
        root = tmp_path / "sets" / "coco"
        write_release(root, year, **json_options)
        return root

    return write
