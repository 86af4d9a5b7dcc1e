"""A trained model in use: images as it was trained on them, every image of another folder, metadata in ONNX."""

import gzip
import json
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import snugfit
from snugfit.api.exporting import export
from snugfit.api.inference import evaluate, predict
from snugfit.api.loading import Architecture
from snugfit.errors import UsageError

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
    with pytest.raises(UsageError, match="use train, val, test or all"):
        evaluate(run, split="everything", model=tiny)


def test_onnx_knows_classes_and_normalisation(trained, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    run, _, _ = trained
    export(run, tmp_path, format="onnx", model=tiny)
    said = {item.key: json.loads(item.value) for item in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert said["class_names"] == [str(digit) for digit in range(10)]
    assert (said["mean"], said["std"], said["border"]) == ([0.1307], [0.3081], 2)
