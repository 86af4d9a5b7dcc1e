"""Names, places, limits and memory of ``load``."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest

import snugfit._data.catalog as catalog
from snugfit._data import ensure, load, names
from snugfit._data.catalog import SOURCES
from snugfit._data.small_images import CIFAR10, cifar_images
from snugfit.errors import DataError, UnknownNameError, UsageError


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch):
    monkeypatch.setattr(catalog, "can_download", lambda: False)


def test_names():
    assert set(names()) == {
        "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "tiny-imagenet", "imagenette", "vww",
        "cub200", "pets", "dogs", "flowers102",
        "folder:PATH",
    }  # fmt: skip


def test_unknown_name_offers_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown data set 'fashion_mnist'. Did you mean 'fashion-mnist'"):
        load("fashion_mnist")


def test_folder_needs_a_path_that_exists(tmp_path):
    with pytest.raises(UsageError, match="folder:PATH"):
        load("folder:")
    with pytest.raises(DataError, match="does not exist"):
        load(f"folder:{tmp_path / 'nowhere'}")
    with pytest.raises(UsageError, match=f"write folder:{tmp_path}"):
        load(str(tmp_path))


def test_relative_folder_is_also_looked_for_under_the_data_dir(write_folder, monkeypatch):
    root = write_folder()
    assert len(load(f"folder:{root.name}", data_dir=root.parent).train) == 16
    monkeypatch.setenv("SNUGFIT_DATA", str(root.parent))
    assert len(load(f"folder:{root.name}").train) == 16


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"digits"}))
def test_missing_data_says_what_where_and_whence(name, tmp_path):
    with pytest.raises(DataError) as caught:
        load(name, data_dir=tmp_path)
    message = str(caught.value)
    assert name in message and str(tmp_path) in message and "http" in message
    assert "--data-dir" in message and "SNUGFIT_DATA" in message and message.count("\n") <= 1


def test_missing_data_dir_and_environment(write_cifar, monkeypatch, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load("cifar10", data_dir=tmp_path / "nowhere")
    monkeypatch.setenv("SNUGFIT_DATA", str(write_cifar()[0]))
    assert len(load("cifar10").test) == 20


def test_packed_archive_is_pointed_out(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").touch()
    with pytest.raises(DataError, match="not unpacked"):
        load("cifar10", data_dir=tmp_path)


def test_an_interrupted_download_is_taken_up_again(write_cifar, tmp_path, monkeypatch):
    """Part of an archive lies there; torchvision's helper compares its sum and fetches it anew."""
    root, fetched = tmp_path / "sets", []
    root.mkdir()
    (root / "cifar-10-binary.tar.gz").write_bytes(b"half of it")
    monkeypatch.setattr(catalog, "can_download", lambda: True)
    monkeypatch.setattr(catalog, "download", lambda name, folder: fetched.append((name, folder, write_cifar())))
    assert len(load("cifar10", data_dir=root).test) == 20
    assert fetched[0][:2] == ("cifar10", root)


def test_mnist_of_which_the_last_file_is_missing_is_fetched(write_idx, monkeypatch):
    root, _ = write_idx()
    last = root / "mnist" / "t10k-labels-idx1-ubyte.gz"
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(DataError, match=r"mnist is not in .* looked for mnist"):
        load("mnist", data_dir=root)
    monkeypatch.setattr(catalog, "can_download", lambda: True)
    monkeypatch.setattr(catalog, "download", lambda name, folder: last.write_bytes(kept))
    assert len(load("mnist", data_dir=root).test) == 40


def test_pickles_are_refused(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError, match=r"holds pickles(.|\n)*cifar-10-binary.tar.gz"):
        load("cifar10", data_dir=tmp_path)


@pytest.fixture
def fake_torchvision(monkeypatch):
    utils = types.SimpleNamespace(calls=[], act=lambda root: None)

    def fetch(url, root, extract_root=None, md5=None):
        print("chatter")
        utils.calls.append((url, root, md5))
        utils.act(Path(extract_root or root))

    utils.download_and_extract_archive = utils.download_url = fetch
    datasets = types.ModuleType("torchvision.datasets")
    datasets.utils = utils
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    monkeypatch.setattr(catalog, "can_download", lambda: True)
    return utils


def test_download_fetches_the_binary_archive_and_keeps_stdout_clean(fake_torchvision, tmp_path, capsys):
    def unpack(root):
        (root / "cifar-10-batches-bin").mkdir()
        (root / "cifar-10-batches-bin" / "test_batch.bin").touch()

    fake_torchvision.act = unpack
    assert ensure("cifar10", tmp_path) == tmp_path / "cifar-10-batches-bin"
    ((url, _, md5),) = fake_torchvision.calls
    assert url.endswith("cifar-10-binary.tar.gz") and len(md5) == 32
    assert capsys.readouterr().out == ""


def test_an_interrupted_unpacking_leaves_no_half_of_a_data_set(fake_torchvision, tmp_path):
    def unpack(root):
        (root / "cifar-10-batches-bin").mkdir()
        (root / "cifar-10-batches-bin" / "data_batch_1.bin").touch()
        if len(fake_torchvision.calls) == 1:
            raise KeyboardInterrupt
        (root / "cifar-10-batches-bin" / "test_batch.bin").touch()

    fake_torchvision.act = unpack
    with pytest.raises(KeyboardInterrupt):
        ensure("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert (ensure("cifar10", tmp_path) / "test_batch.bin").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["cifar-10-batches-bin"]


def test_failed_download_gives_the_reason_and_the_source(fake_torchvision, tmp_path):
    def fail(root):
        raise OSError("network unreachable")

    fake_torchvision.act = fail
    with pytest.raises(DataError, match=r"network unreachable(.|\n)*yann.lecun.com"):
        load("mnist", data_dir=tmp_path)


def test_limits_are_balanced_and_keep_the_division(write_cifar):
    root, _ = write_cifar()
    whole, limited = load("cifar10", data_dir=root), load("cifar10", data_dir=root, max_train=25, max_val=10)
    assert (len(limited.train), len(limited.val), len(limited.test)) == (25, 10, 10)
    assert set(np.bincount(limited.train.labels)) == {2, 3} and set(np.bincount(limited.test.labels)) == {1}
    assert np.array_equal(limited.val.labels, whole.val.labels)
    assert set(limited.train.parent.indices) == set(whole.train.indices)
    again = load("cifar10", data_dir=root, max_train=25)
    assert np.array_equal(limited.train.indices, again.train.indices)
    assert not np.array_equal(whole.val.indices, load("cifar10", data_dir=root, seed=1).val.indices)


def test_validation_is_stratified_and_disjoint(write_cifar):
    root, _ = write_cifar()
    splits = load("cifar10", data_dir=root, val_fraction=0.2)
    assert np.bincount(splits.val.labels).tolist() == [2] * 10
    assert not set(splits.val.indices) & set(splits.train.indices)


@pytest.mark.parametrize(
    "options", [{"max_train": 0}, {"max_val": -1}, {"val_fraction": 0.0}, {"val_fraction": 1.0}, {"image_size": 0}]
)
def test_senseless_numbers(options):
    with pytest.raises(UsageError):
        load("digits", **options)


def test_wrong_number_of_classes():
    with pytest.raises(DataError, match="'digits' has 10 classes, not 7"):
        load("digits", classes=7)


def anonymous_bytes():
    status = Path("/proc/self/status")
    if not status.exists() or "RssAnon" not in status.read_text():
        pytest.skip("needs RssAnon in /proc/self/status")
    return int(status.read_text().split("RssAnon:")[1].split()[0]) * 1024


def test_reading_a_batch_of_a_large_file_costs_little_memory(tmp_path):
    path, count = tmp_path / "large.bin", 17_000
    with path.open("wb") as file:
        for i in range(count):
            file.write(bytes([i % 10]) + bytes([i % 251]) * 3072)
    assert path.stat().st_size > 50_000_000
    before = anonymous_bytes()
    images = cifar_images(path.parent, (path.name,), CIFAR10, 32)
    batch = images.images(np.arange(0, count, 200))
    assert (batch[:, 0, 0, 0].numpy() == np.arange(0, count, 200) % 251).all()
    assert anonymous_bytes() - before < 4_000_000
