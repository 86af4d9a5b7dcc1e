"""Original distribution formats, written small and read back; and what is wrong with them."""

import gzip
import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from snugfit._data import load, super_classes
from snugfit.errors import DataError


def all_images(images):
    return images.images(np.arange(len(images)))


def test_cifar10_rows_come_from_the_right_files(write_cifar):
    root, written = write_cifar()
    splits = load("cifar10", data_dir=root)
    assert splits.image_shape == (3, 32, 32) and splits.class_names[3] == "class3"
    assert (len(splits.train), len(splits.val), len(splits.test)) == (90, 10, 20)
    labels, pixels = written["test_batch.bin"]
    assert np.array_equal(all_images(splits.test).numpy(), pixels)
    assert np.array_equal(splits.test.labels, labels)
    every = np.concatenate([written[f"data_batch_{i}.bin"][1] for i in range(1, 6)])
    for part in (splits.train, splits.val):
        backwards = np.arange(len(part))[::-1]
        assert np.array_equal(part.images(backwards).numpy(), every[part.indices[backwards]])
    assert np.array_equal(np.sort(np.r_[splits.train.indices, splits.val.indices]), np.arange(100))


def test_cifar100_uses_fine_labels(write_cifar):
    root, written = write_cifar(classes=100, per_file=200)
    splits = load("cifar100", data_dir=root, val_fraction=0.3)
    labels, pixels = written["test.bin"]
    assert np.array_equal(splits.test.labels, labels) and len(splits.class_names) == 100
    assert np.array_equal(splits.test.images(np.array([7])).numpy()[0], pixels[7])


def test_cifar100_says_the_super_class_of_every_class(write_cifar):
    root, _ = write_cifar(classes=100, per_file=200)
    assert super_classes("CIFAR100", root) == tuple(f"super{i // 5}" for i in range(100))
    (root / "cifar-100-binary" / "coarse_label_names.txt").unlink()
    assert super_classes("cifar100", root)[99] == "19"
    assert super_classes("cifar10", root / "nowhere") is None


@pytest.mark.parametrize(("record", "label"), [(3, 7), (103, 7), (0, 20)])
def test_contradicting_super_classes_are_refused(write_cifar, record, label):
    root, _ = write_cifar(classes=100, per_file=200)
    place = record * (2 + 3072)
    overwrite(root / "cifar-100-binary" / "test.bin", lambda old: old[:place] + bytes([label]) + old[place + 1 :])
    with pytest.raises(DataError, match=r"super-class|label 20"):
        super_classes("cifar100", root)


def test_a_class_without_images_has_no_super_class(write_cifar):
    root, _ = write_cifar(classes=100, per_file=99)
    with pytest.raises(DataError, match="every class into one super-class"):
        super_classes("cifar100", root)


def test_cifar_folder_itself_may_be_the_data_dir(write_cifar):
    root, _ = write_cifar()
    assert len(load("CIFAR10", data_dir=root / "cifar-10-batches-bin").test) == 20


def test_cifar_resized(write_cifar):
    root, written = write_cifar()
    splits = load("cifar10", data_dir=root, image_size=64)
    want = F.interpolate(torch.from_numpy(written["test_batch.bin"][1]).float(), scale_factor=2, mode="bilinear")
    assert splits.image_shape == (3, 64, 64)
    assert (all_images(splits.test).float() - want).abs().max() <= 1


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx(write_idx, name, compress):
    root, (pixels, labels) = write_idx(name, compress)
    splits = load(name, data_dir=root)
    assert splits.image_shape == (1, 32, 32) and splits.flip is (name == "fashion-mnist")
    got = splits.train.images(np.arange(5)).numpy()
    assert np.array_equal(got[:, 0, 2:30, 2:30], pixels[splits.train.indices[:5]])
    assert got.sum() == pixels[splits.train.indices[:5]].sum()
    assert np.array_equal(splits.train.labels, labels[splits.train.indices])
    assert np.array_equal(
        load(name, data_dir=root, image_size=28).train.images(np.arange(5))[:, 0], got[:, 0, 2:30, 2:30]
    )


def test_compressed_idx_is_unpacked_once_and_anew_when_it_changes(write_idx, tmp_path):
    root, _ = write_idx()
    load("mnist", data_dir=root)
    cached = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "snugfit").iterdir()}
    load("mnist", data_dir=root)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "snugfit").iterdir()} == cached
    assert sorted(path.name for path in (root / "mnist").iterdir()) == sorted(
        f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    )
    with gzip.open(root / "mnist" / "t10k-labels-idx1-ubyte.gz", "wb") as file:
        file.write(b"\x00\x00\x08\x01\x00\x00\x00\x28" + b"\x07" * 40)
    assert (load("mnist", data_dir=root).test.labels == 7).all()


def test_digits_need_no_files_and_divide_the_same_way_always():
    first, second = load("digits"), load("digits", seed=5, val_fraction=0.2)
    assert first.image_shape == (1, 32, 32) and not first.flip
    assert len(first.train) + len(first.val) + len(first.test) == 1797
    assert np.array_equal(first.test.indices, second.test.indices)
    sklearn = pytest.importorskip("sklearn.datasets").load_digits()
    small = load("digits", image_size=8)
    assert np.array_equal(small.test.labels, sklearn.target[small.test.indices])
    want = sklearn.images[small.test.indices] * 255 / 16
    assert np.abs(all_images(small.test).numpy()[:, 0] - want).max() <= 0.5


def test_digits_statistics_are_those_of_the_images():
    digits = load("digits")
    pixels = all_images(digits.train).double() / 255
    assert abs(float(pixels.mean()) - digits.mean[0]) < 2e-3 and abs(float(pixels.std()) - digits.std[0]) < 2e-3


def test_missing_scikit_learn(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"snugfit\[demo\]"):
        load("digits")


def overwrite(path, change):
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))


def label_250(data):
    data[3073] = 250
    return data


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("data_batch_3.bin", lambda data: data[:-5], "data_batch_3.bin is truncated"),
        ("data_batch_3.bin", lambda data: b"", "data_batch_3.bin is truncated"),
        ("test_batch.bin", label_250, "test_batch.bin: record 1 has label 250"),
        ("batches.meta.txt", lambda data: b"cat dog", "batches.meta.txt names 2 classes"),
    ],
)
def test_damaged_cifar(write_cifar, file, change, message):
    root, _ = write_cifar()
    overwrite(root / "cifar-10-batches-bin" / file, change)
    with pytest.raises(DataError, match=message):
        load("cifar10", data_dir=root)


def test_missing_cifar_file(write_cifar):
    root, _ = write_cifar()
    (root / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4.bin is missing"):
        load("cifar10", data_dir=root)


def label_77(data):
    data[-1] = 77
    return data


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train-images-idx3-ubyte", lambda data: data[:-5], "train-images-idx3-ubyte is truncated"),
        ("train-images-idx3-ubyte", lambda data: data[:3], "not an IDX file"),
        ("train-labels-idx1-ubyte", lambda data: b"\x00\x00\x0d\x01" + data[4:], "not an IDX file"),
        (
            "t10k-labels-idx1-ubyte",
            lambda data: b"\x00\x00\x08\x01\x00\x00\x00\x02\x01\x01",
            "40 images but .* 2 labels",
        ),
        ("t10k-labels-idx1-ubyte", label_77, "record 39 has label 77"),
    ],
)
def test_damaged_idx(write_idx, file, change, message):
    root, _ = write_idx(compress=False)
    overwrite(root / "mnist" / file, change)
    with pytest.raises(DataError, match=message):
        load("mnist", data_dir=root)


@pytest.mark.parametrize(
    "change", [lambda data: data[: len(data) // 2], lambda data: b"PK" + data, lambda data: data[:3]]
)
def test_damaged_gz(write_idx, change, tmp_path):
    root, _ = write_idx()
    overwrite(root / "mnist" / "train-images-idx3-ubyte.gz", change)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is corrupt or truncated"):
        load("mnist", data_dir=root)
    assert not list((tmp_path / "cache" / "snugfit").glob("train-images*"))


def idx_header(*extents):
    return struct.pack(f">HBB{len(extents)}i", 0, 8, len(extents), *extents)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    "extents", [(-40, 28, 28), (40, -28, -28), (2**31 - 1,) * 3, (40, 0, 28), (40, 1 << 30, 1), (10**8, 28, 28)]
)
def test_idx_headers_that_no_images_have(write_idx, compress, extents):
    root, _ = write_idx(compress=compress)
    path = root / "mnist" / ("train-images-idx3-ubyte" + (".gz" if compress else ""))
    data = idx_header(*extents) + b"\1" * 40 * 28 * 28
    path.write_bytes(gzip.compress(data) if compress else data)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.*: its header says .* which no images have"):
        load("mnist", data_dir=root)


def test_no_more_is_unpacked_than_the_header_promises(write_idx, tmp_path, monkeypatch):
    """A bomb of 64 MB in 64 kB: what is written to the cache is a byte more than promised, and does not stay."""
    root, _ = write_idx()
    bomb = gzip.compress(idx_header(40, 28, 28) + bytes(1 << 26))
    (root / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(bomb)
    read, real = [], gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size: read.append(size) or real(self, size))
    with pytest.raises(DataError, match="holds more or less than its header says"):
        load("mnist", data_dir=root)
    assert sum(read) <= 16 + 40 * 28 * 28 + 17
    assert not list((tmp_path / "cache" / "snugfit").glob("train-images*"))


def test_a_sparse_file_is_no_cifar(write_cifar):
    """Its labels alone would take gigabytes."""
    root, _ = write_cifar()
    with (root / "cifar-10-batches-bin" / "test_batch.bin").open("r+b") as file:
        file.truncate(3073 * 10**8)
    with pytest.raises(DataError, match=r"test_batch\.bin is not a CIFAR file: it has 100,000,000 records"):
        load("cifar10", data_dir=root)


def test_names_of_classes_that_are_no_text(write_cifar):
    root, _ = write_cifar()
    (root / "cifar-10-batches-bin" / "batches.meta.txt").write_bytes(b"\xff\xfe" * 10)
    with pytest.raises(DataError, match=r"batches\.meta\.txt cannot be read"):
        load("cifar10", data_dir=root)


def test_a_packed_file_with_zeros_without_end_is_refused(write_idx):
    """gzip reads over zeros behind the end; a sparse file may have a million million of them."""
    root, _ = write_idx()
    with (root / "mnist" / "t10k-labels-idx1-ubyte.gz").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"labels-idx1-ubyte\.gz is larger than its header says"):
        load("mnist", data_dir=root)
