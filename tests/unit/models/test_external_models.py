"""Networks from torchvision, timm, and the user's own functions."""

import importlib.util
import re
import sys

import pytest
import torch
from torch import nn

from snugfit._models import build, external
from snugfit._models.external import from_callable
from snugfit.errors import ModelError, UnknownNameError

SOURCE = """
from torch import nn
def with_classes(classes): return nn.Linear(3, classes)
def with_num_classes(width=5, num_classes=2): return nn.Linear(width, num_classes)
def without(): return nn.Linear(3, 4)
def failing(classes): raise RuntimeError("no such backbone\\nsecond line")
def wrong(): return "a model"
class Net(nn.Linear):
    def __init__(self, classes): super().__init__(3, classes)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "nets_of_mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    yield "nets_of_mine"
    sys.modules.pop("nets_of_mine", None)


@pytest.mark.parametrize(
    ("function", "outputs"), [("with_classes", 6), ("with_num_classes", 6), ("without", 4), ("Net", 6)]
)
def test_own_callable_gets_the_number_of_classes_if_it_takes_it(own_module, function, outputs):
    path = list(sys.path)
    assert build(f"{own_module}:{function}", 6, 32).out_features == outputs
    assert sys.path == path


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("failing", "failed: RuntimeError: no such backbone"),
        ("wrong", "returned str, not a torch.nn.Module"),
        ("absent", "cannot import"),
    ],
)
def test_own_callable_that_does_not_serve(own_module, function, message):
    with pytest.raises(ModelError, match=message) as caught:
        build(f"{own_module}:{function}", 6, 32)
    assert "\n" not in str(caught.value)


def test_missing_module():
    said = (
        "cannot import nowhere_at_all:net: ModuleNotFoundError: .* Run the command in the folder that holds the module"
    )
    with pytest.raises(ModelError, match=said):
        build("nowhere_at_all:net", 6, 32)
    with pytest.raises(
        ModelError, match=r"cannot import nets/own.py:net: ModuleNotFoundError: .* Write nets\.own:net\.$"
    ):
        build("nets/own.py:net", 6, 32)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_missing_package_says_what_to_install(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.models", None)
    version = re.escape(torch.__version__.partition("+")[0])
    told = rf'^{package} is not installed.*pip install "snugfit\[vision\]" torch=={version}$'
    with pytest.raises(ModelError, match=told):
        build(f"{package}:resnet50", 10, 224)


def test_the_package_that_is_missing_is_named(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("import nowhere_at_all.operators")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ModelError, match=r"^nowhere_at_all is not installed"):
        build("timm:resnet26", 10, 64)


def test_plain_name_without_torchvision_is_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(UnknownNameError):
        build("regnet_y_400mf", 10, 224)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvision_models_by_both_names():
    with torch.device("meta"):
        for name in ("torchvision:resnet34", "resnet34"):
            model = build(name, 12, 224)
            assert isinstance(model, nn.Module)
            assert model.fc.out_features == 12
        with pytest.raises(UnknownNameError, match="torchvision model"):
            build("torchvision:resnet5O", 12, 224)
        with pytest.raises(ModelError, match="3 channels"):
            build("torchvision:resnet50", 12, 224, channels=1)


MISMATCHED = """
import torch
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        raise RuntimeError(f"operator torchvision::{name} does not exist")
"""


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_package_whose_compiled_part_is_of_another_torch_is_imported_nevertheless(tmp_path, monkeypatch):
    (tmp_path / "unmatched_nets.py").write_text(MISMATCHED)
    (tmp_path / "broken_nets.py").write_text("raise RuntimeError('of another kind')")
    monkeypatch.syspath_prepend(tmp_path)
    assert external._package("unmatched_nets", "unmatched").__name__ == "unmatched_nets"
    with pytest.raises(ModelError, match="broken cannot be imported: RuntimeError: of another kind"):
        external._package("broken_nets", "broken")


@pytest.mark.parametrize("text", ["raise MemoryError", "def net():\n    raise MemoryError"])
def test_memory_that_is_refused_is_no_defect_of_the_module(tmp_path, monkeypatch, text):
    (tmp_path / "hungry_nets.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hungry_nets", raising=False)
    with pytest.raises(MemoryError):
        from_callable("hungry_nets:net", 3)
