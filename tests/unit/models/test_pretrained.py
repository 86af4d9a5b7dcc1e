"""Weights by name: by which library, from where, and what is said if there are none. The libraries are stand-ins."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

import snugfit
from snugfit import _models as models
from snugfit._core import known
from snugfit._core.known import check_names, weights_source
from snugfit._core.request import Request
from snugfit._models.pretrained import pretrained_file
from snugfit.errors import ModelError, UsageError

URL = "https://download.example.org/models/resnet50-11ad3fa6.pth"


@pytest.fixture
def installed(monkeypatch):
    """Which packages are found."""
    found = {"timm", "torchvision"}
    monkeypatch.setattr(known, "find_spec", lambda name: SimpleNamespace() if name in found else None)
    monkeypatch.setattr(known, "_torchvision_defines", lambda name: name == "densenet121")
    return found


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("resnet50", ("torchvision", "resnet50")),
        ("vgg16_imagenet", ("torchvision", "vgg16")),
        ("torchvision:convnext_tiny", ("torchvision", "convnext_tiny")),
        ("timm:resnet10t", ("timm", "resnet10t")),
        ("densenet121", ("torchvision", "densenet121")),
    ],
)
def test_a_models_weights_have_one_source(installed, model, source):
    assert weights_source(model) == source
    installed.clear()
    with pytest.raises(UsageError, match=rf"by {source[0]}, which is not installed: pip install \"snugfit\[vision\]\""):
        weights_source(model)


@pytest.mark.parametrize("model", ["vgg8", "resnet20", "my.module:net", "python", "timm:"])
def test_other_models_have_none(installed, model):
    with pytest.raises(UsageError, match=f"--weights imagenet is for resnet50, .* not for {model}; give a file"):
        weights_source(model)


def test_the_command_line_says_so_before_torch_is_imported():
    with pytest.raises(UsageError, match="not for vgg8"):
        check_names(Request.of(model="vgg8", weights="imagenet"))


@pytest.fixture
def torchvision(installed, monkeypatch, tmp_path):
    """A torchvision whose weights are a file here; returns what was downloaded."""
    downloads = []

    def download(url, path, hash_prefix, progress):
        downloads.append((url, hash_prefix))
        torch.save({"fc.bias": torch.zeros(3)}, path)

    api = SimpleNamespace(get_model_weights=lambda name: SimpleNamespace(DEFAULT=SimpleNamespace(url=URL)))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=api))
    monkeypatch.setitem(sys.modules, "torchvision.models", api)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    return downloads


def test_torchvisions_file_is_downloaded_once_by_its_hash(torchvision, tmp_path):
    for _ in range(2):
        assert pretrained_file("resnet50") == tmp_path / "hub" / "checkpoints" / "resnet50-11ad3fa6.pth"
    assert torchvision == [(URL, "11ad3fa6")]


def test_a_failed_download_is_one_clear_error(torchvision, monkeypatch):
    def fail(*given, **options):
        raise OSError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(ModelError, match=r"cannot be downloaded: Name or service not known.*--weights FILE"):
        pretrained_file("resnet50")


def test_timms_safetensors_are_taken_from_its_hub(installed, monkeypatch, tmp_path):
    asked = []
    hub = SimpleNamespace(hf_hub_download=lambda *given: asked.append(given) or str(tmp_path / "w"))
    ids = {"resnet10t": "timm/resnet10t.c3_in1k", "untrained": None}
    config = SimpleNamespace(get_pretrained_cfg=lambda name: SimpleNamespace(hf_hub_id=ids[name]))
    monkeypatch.setitem(sys.modules, "timm", config)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert pretrained_file("timm:resnet10t") == tmp_path / "w"
    assert asked == [("timm/resnet10t.c3_in1k", "model.safetensors")]
    with pytest.raises(ModelError, match="timm has no weights of untrained"):
        pretrained_file("timm:untrained")


def test_what_the_hub_logs_is_in_the_error_alone(installed, monkeypatch, caplog):
    logger = logging.getLogger("huggingface_hub")
    logger.setLevel(logging.WARNING)

    def fail(*given):
        logging.getLogger("huggingface_hub.utils._http").warning("thrown while requesting HEAD")
        raise OSError("no connection")

    config = SimpleNamespace(get_pretrained_cfg=lambda name: SimpleNamespace(hf_hub_id="timm/resnet10t"))
    monkeypatch.setitem(sys.modules, "timm", config)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fail))
    with pytest.raises(ModelError, match="cannot be downloaded: no connection"):
        pretrained_file("timm:resnet10t")
    assert not caplog.messages and logger.level == logging.WARNING


def test_a_run_starts_from_them_and_says_what_was_loaded(torchvision, monkeypatch, tmp_path):
    torch.manual_seed(0)
    state = models.build("mobilenet_v2", 1000, 32, 1).state_dict()
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda url, path, *rest, **more: torch.save(state, path))
    notes = []
    small = {"image_size": 32, "max_train": 16, "max_val": 10, "batch_size": 8, "epochs": 1, "threads": 1}
    plan = snugfit.plan(
        "mobilenet_v2", "digits", weights="imagenet", strategy="backprop", subscribers=[notes.append], **small
    )
    kept = str(tmp_path / "hub" / "checkpoints" / "resnet50-11ad3fa6.pth")
    assert plan.assembly.request.model.weights == kept, "so that nothing is downloaded again on resume"
    (said,) = (note.message for note in notes if isinstance(note, snugfit.Notice) and "tensors loaded" in note.message)
    count = sum(not name.endswith("num_batches_tracked") for name in state)
    fresh = "classifier.1.weight, classifier.1.bias"
    assert said == f"{kept}: {count - 2} of {count} tensors loaded; initialised anew: {fresh}"
