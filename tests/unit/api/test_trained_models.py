"""A trained model in use: images as it was trained on them, every image of another folder, metadata in ONNX."""

import errno
import gzip
import json
import shutil
import struct
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import snugfit
from snugfit import evaluate, export, predict
from snugfit._api.training import TrainedRecord
from snugfit._engine import exporting
from snugfit._engine.loading import Architecture
from snugfit.errors import CheckpointError, DataError, ModelError, OutOfStorageError, UsageError

COUNT = 40


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 10))


def write_mnist(folder):
    """MNIST's files with noise in them; returns the test images."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for prefix in ("train", "t10k"):
        pixels = rng.integers(0, 256, (COUNT, 28, 28), dtype=np.uint8)
        labels = (np.arange(COUNT) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            with gzip.open(folder / f"{prefix}-{kind}-ubyte.gz", "wb") as file:
                file.write(header + array.tobytes())
    return pixels


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on that MNIST, its data folder, and the test images."""
    where = tmp_path_factory.mktemp("used")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(where / "cache"))
        pixels = write_mnist(where / "sets" / "mnist")
        plan = snugfit.plan(tiny(), "mnist", data_dir=str(where / "sets"), strategy="backprop", epochs=1)
        plan.run((), out=where / "run")
    return where / "run", where / "sets", pixels


@pytest.fixture
def photos(trained, tmp_path):
    """The test images as 28 x 28 files in class folders."""
    for index, image in enumerate(trained[2]):
        folder = tmp_path / "photos" / str(index % 10)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{index:02d}.png")
    return tmp_path / "photos"


def test_images_get_the_border_that_training_gave_them(trained, photos, monkeypatch):
    run, _, pixels = trained
    assert Architecture.read(run).border == 2
    rows = {path.rpartition("/")[2]: float(value) for path, _, value in predict(run, photos, model=tiny)}
    network, architecture = snugfit.load(run, model=tiny), Architecture.read(run)
    padded = nn.functional.pad(torch.from_numpy(pixels)[:, None].float() / 255, (2, 2, 2, 2))
    with torch.no_grad():
        expected = network((padded - architecture.mean[0]) / architecture.std[0]).softmax(1).amax(1)
    assert torch.allclose(torch.tensor([rows[name] for name in sorted(rows)]), expected, atol=1e-5)


def test_all_splits_can_be_measured_together(trained):
    run, _, _ = trained
    own = evaluate(run, model=tiny)
    assert (own["split"], own["count"]) == ("test", COUNT)
    every = evaluate(run, split="all", model=tiny)
    assert every["count"] == 2 * COUNT
    parts = [evaluate(run, split=name, model=tiny) for name in ("train", "val", "test")]
    assert every["accuracy"] == pytest.approx(sum(part["accuracy"] * part["count"] for part in parts) / (2 * COUNT))
    with pytest.raises(UsageError, match="Known: all, test, train, val"):
        evaluate(run, split="everything", model=tiny)


def test_another_folder_is_measured_whole(trained, photos):
    """Grey images with the border of training, and no class too small to be divided."""
    run, _, _ = trained
    whole = evaluate(run, data=f"folder:{photos}", model=tiny)
    assert (whole["split"], whole["count"]) == ("all", COUNT)
    assert whole["accuracy"] == evaluate(run, model=tiny)["accuracy"], "they are the images of the test split"
    for label in range(10):
        for image in sorted((photos / str(label)).iterdir())[1:]:
            image.unlink()
    assert evaluate(run, data=f"folder:{photos}", model=tiny)["count"] == 10


def test_the_runs_own_folder_is_not_measured_whole_however_it_is_written(tmp_path, monkeypatch):
    """Training images would count otherwise."""
    rng = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for index in range(10):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{index}.png")
    monkeypatch.chdir(tmp_path)

    def make():
        return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 2))

    plan = snugfit.plan(make, "folder:photos", image_size=32, strategy="backprop", epochs=1, batch_size=8)
    plan.run((), out=tmp_path / "run")
    for name in (
        "folder:photos",
        "folder:photos/",
        f"folder:{tmp_path}/photos",
        "folder:../" + tmp_path.name + "/photos",
    ):
        own = evaluate(tmp_path / "run", data=name, model=make)
        assert (own["split"], own["count"]) == ("test", 2), name
    (tmp_path / "photos").rename(tmp_path / "others")
    assert evaluate(tmp_path / "run", data="folder:others", model=make)["count"] == 20


def test_a_plan_can_be_run_again(tmp_path, monkeypatch):
    """The exit of the first run was tested on maps of its weights, which nothing may write to."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def make(classes):\n"
        "    parts = [nn.Conv2d(1, 4, 3, stride=4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()]\n"
        "    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(4 * 4, classes))\n"
    )
    options = {"image_size": 16, "max_train": 40, "max_val": 20, "batch_size": 8, "epochs": 1}
    plan = snugfit.plan("nets:make", "digits", strategy="blockwise", module_units="1", **options)
    weights = [plan.run((), out=tmp_path / name).model.state_dict() for name in ("first", "second")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_onnx_knows_classes_and_normalisation(trained, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    run, _, _ = trained
    export(run, tmp_path, format="onnx", model=tiny)
    said = {item.key: json.loads(item.value) for item in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert said["class_names"] == [str(digit) for digit in range(10)]
    assert (said["mean"], said["std"], said["border"]) == ([0.1307], [0.3081], 2)


def pooled():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 10))


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A run of a network that takes images of any size, on digits."""
    where = tmp_path_factory.mktemp("pooled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(where / "cache"))
        sizes = {"max_train": 60, "max_val": 30, "image_size": 8, "epochs": 1, "batch_size": 20}
        snugfit.plan(pooled(), "digits", strategy="backprop", **sizes).run((), out=where / "run")
    return where / "run"


def test_onnx_takes_images_of_any_size_where_the_network_does(small_run, trained, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export(small_run, tmp_path / "free", format="onnx", model=pooled, free_size=True)
    images = torch.randn(2, 1, 21, 13)
    session = runtime.InferenceSession(str(tmp_path / "free" / "model.onnx"))
    found = session.run(None, {"images": images.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), snugfit.load(small_run, pooled)(images).detach())
    with pytest.raises(ModelError, match="--free-size: the network takes images of 32 x 32 alone"):
        export(trained[0], tmp_path / "fixed", format="onnx", model=tiny, free_size=True)


def test_onnx_file_appears_only_after_it_was_checked(small_run, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    shutil.copytree(small_run, run := tmp_path / "run")
    (earlier := tmp_path / "earlier").mkdir()
    (earlier / "model.onnx").write_bytes(b"earlier")
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "TOLERANCE", -1.0)
        for out in (None, earlier, tmp_path / "new"):
            with pytest.raises(ModelError, match=r"differ from PyTorch's by .*; nothing was written"):
                export(run, out, format="both", model=pooled)
    assert snugfit.verify(run).sound and not (run / "model.onnx").exists() and not list((tmp_path / "new").iterdir())
    assert [(path.name, path.read_bytes()) for path in earlier.iterdir()] == [("model.onnx", b"earlier")]
    for _ in range(2):
        export(run, format="onnx", model=pooled)
        found = snugfit.verify(run)
        assert found.sound and found.files == snugfit.verify(small_run).files + 1 and not found.extra


def test_an_onnx_file_that_gives_nan_is_refused(small_run, tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    network = snugfit.load(small_run, pooled)

    class Session:
        def get_inputs(self):
            return [SimpleNamespace(name="images")]

        def run(self, names, given):
            return [np.full((len(given["images"]), 10), np.nan, np.float32)]

    monkeypatch.setattr(exporting, "quiet_session", lambda path: Session())
    with pytest.raises(ModelError, match="differ from PyTorch's by nan"):
        exporting.onnx_difference(network, (1, 8, 8), path)


def test_an_onnx_file_may_give_the_same_infinity(tmp_path, monkeypatch):
    logits = np.array([[1.0, -np.inf]], np.float32)
    session = SimpleNamespace(get_inputs=lambda: [SimpleNamespace(name="images")], run=lambda *_: [logits])
    monkeypatch.setattr(exporting, "quiet_session", lambda path: session)
    exact = torch.from_numpy(logits)
    assert exporting.onnx_difference(lambda images: exact, (1, 8, 8), tmp_path) == 0
    for other in (exact + 0.5, -exact, torch.zeros(1, 2), torch.full((1, 2), torch.nan)):
        with pytest.raises(ModelError, match="differ from PyTorch's"):
            exporting.onnx_difference(lambda images, other=other: other, (1, 8, 8), tmp_path)


def test_a_disk_that_fills_leaves_the_earlier_model(small_run, tmp_path, monkeypatch):
    def fill(source, destination):
        destination.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(destination))

    (tmp_path / "model.safetensors").write_bytes(b"earlier")
    monkeypatch.setattr(exporting.shutil, "copyfile", fill)
    with pytest.raises(OutOfStorageError, match=r"no space left .* while writing .*model\.safetensors"):
        export(small_run, tmp_path, format="safetensors", model=pooled)
    assert (tmp_path / "model.safetensors").read_bytes() == b"earlier"


def test_the_folder_of_another_run_is_no_place_for_an_export(small_run, tmp_path):
    shutil.copytree(small_run, other := tmp_path / "other")
    with pytest.raises(UsageError, match="other is another run, whose model this would replace"):
        export(small_run, other, format="safetensors", model=pooled)
    assert snugfit.verify(other).sound
    assert export(other, other, format="safetensors", model=pooled)["files"] == [str(other / "model.safetensors")]


def test_int8_is_smaller_and_measured_on_test_images(small_run, tmp_path, capfd):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    found = export(small_run, tmp_path, format="onnx", model=pooled, int8=True)
    path = tmp_path / "model.int8.onnx"
    assert found["files"] == [str(tmp_path / "model.onnx"), str(path)] and "".join(capfd.readouterr()) == ""
    expected, said = evaluate(small_run, model=pooled), found["int8"]
    assert (said["split"], said["count"]) == ("test", expected["count"]) and said["bytes"] == path.stat().st_size
    assert said["float_accuracy"] == expected["accuracy"] and said["calibration_images"] == 60
    kinds = {node.op_type for node in pytest.importorskip("onnx").load(path).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    session, images = runtime.InferenceSession(str(path)), torch.rand(8, 1, 8, 8)  # within the range of digits
    exact = snugfit.load(small_run, pooled)(images).detach()
    near = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    assert 0 < float((near - exact).abs().max()) < 0.1 * float(exact.abs().max())


def test_int8_file_appears_only_after_it_was_measured(small_run, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    def fail(*_):
        raise DataError("no images")

    (tmp_path / "model.int8.onnx").write_bytes(b"earlier")
    monkeypatch.setattr(exporting, "_accuracy", fail)
    with pytest.raises(DataError, match="no images"):
        export(small_run, tmp_path, format="onnx", model=pooled, int8=True)
    assert (tmp_path / "model.int8.onnx").read_bytes() == b"earlier"
    assert {path.name for path in tmp_path.iterdir()} == {"architecture.json", "model.onnx", "model.int8.onnx"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "safetensors", "int8": True}, "--int8 is for ONNX"),
        ({"format": "safetensors", "free_size": True}, "--free-size is for ONNX"),
        ({"data": "digits"}, "--data and --data-dir of an export are for --int8"),
        ({"free_size": "maybe"}, "must be true or false"),
    ],
)
def test_options_of_onnx_are_checked_first(options, says):
    for write in (partial(export, "no/run"), TrainedRecord(SimpleNamespace(run_dir="no/run")).export):
        with pytest.raises(UsageError, match=says):
            write(**options)


def test_a_relative_run_folder_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(b"weights")
    record = TrainedRecord(SimpleNamespace(run_dir="run", model="m", strategy="backprop"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert record.save("saved").read_bytes() == b"weights"
    assert repr(record) == "<TrainedRecord of m by backprop, in run>"


def test_saving_keeps_the_older_file_where_the_disk_is_full(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    saved = tmp_path / "saved.safetensors"
    record = TrainedRecord(SimpleNamespace(run_dir=str(tmp_path)))
    assert record.save(saved) == saved and saved.read_bytes() == b"weights"

    def full(source, target):
        target.write(source.read(3))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OutOfStorageError, match=r"saved\.safetensors"):
        record.save(str(saved))
    assert saved.read_bytes() == b"weights" and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(CheckpointError, match=r"cannot write .*missing"):
        record.save(tmp_path / "missing" / "saved.safetensors")
