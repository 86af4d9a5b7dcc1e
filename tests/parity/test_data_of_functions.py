"""Data sets that ``--data module:function`` names, of one input or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import assert_same, interrupt
from safetensors.torch import load_file
from torch import Tensor, nn

import snugfit
from snugfit._core import known
from snugfit._core.request import Request
from snugfit._data import load
from snugfit._data.labels_file import load_labelled
from snugfit.errors import DataError, UsageError

MODULE = """
import snugfit, torch
IMAGES = [(torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(n)), n % 2) for n in range(40)]
def whole(): return IMAGES
def parts(): return IMAGES[:20], IMAGES[20:32], IMAGES[32:]
def pairs(): return [((image, torch.tensor([float(label), 1.0])), label) for image, label in IMAGES], IMAGES_OF_TWO
IMAGES_OF_TWO = [((image, torch.zeros(2)), label) for image, label in IMAGES[:8]]
def prepared(): return snugfit.from_dataset(IMAGES[:32], IMAGES[32:], as_is=True, name="mine")
def vectors(): return [(image, torch.tensor([label, 1 - label, 1])) for image, label in IMAGES]
def nothing(): pass
def many(): return 1, 2, 3, 4
def fails(): raise KeyError("there is no key")
class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(6, classes)
    def forward(self, image, values):
        return self.head(torch.cat([self.conv(image).relu().mean((2, 3)), values], 1))
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of its own name in the current folder."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def counts(splits: Any) -> list[int]:
    return [0 if part is None else len(part) for part in (splits.train, splits.val, splits.test)]


def test_a_function_gives_one_data_set_or_its_parts(module: str) -> None:
    found = load(f"{module}:parts", image_size=16, max_train=10)
    assert counts(found) == [10, 12, 8] and found.image_shape == (3, 16, 16) and found.name == f"{module}:parts"
    assert counts(load(f"{module}:whole")) == [32, 4, 4]


def test_a_function_gives_what_from_dataset_makes(module: str) -> None:
    found = load(f"{module}:prepared", max_train=12, max_val=4, image_size=8)
    assert counts(found) == [12, 4, 0] and found.as_is and found.name == "mine"
    with pytest.raises(UsageError, match=r"prepares images of 8x8 pixels .* leave out --image-size"):
        load(f"{module}:prepared", image_size=16)
    with pytest.raises(DataError, match="has 2 classes, not 3"):
        load(f"{module}:prepared", classes=3)


def test_several_labels_are_named_by_their_task(module: str) -> None:
    assert load_labelled(f"{module}:vectors").train.has_several_labels
    known.check_names(Request.of(data=f"{module}:vectors", task="multi-label"))
    with pytest.raises(UsageError, match="--task multi-label trains on them"):
        snugfit.plan(nn.Sequential(nn.Conv2d(3, 3, 8), nn.Flatten()), f"{module}:vectors")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}:none", "cannot import .*: AttributeError: .*Write it as package.module:function"),
        ("no_such_module:data", "cannot import no_such_module:data: ModuleNotFoundError"),
        ("{}:fails", "fails failed: KeyError: 'there is no key'"),
        ("{}:nothing", "nothing returned nothing; return a data set"),
        ("{}:many", "returned 4 values; return a data set, or a tuple of two or three"),
    ],
)
def test_what_a_function_must_do_is_said(module: str, name: str, said: str) -> None:
    known.check_names(Request.of(data=name.format(module)))
    with pytest.raises(DataError, match=said):
        load(name.format(module))


def test_a_network_of_several_inputs_is_trained_and_resumed_by_names(module: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": "backprop", "epochs": 1, "batch_size": 8, "threads": 1}

    def plan() -> Any:
        return snugfit.plan(f"{module}:Net", f"{module}:pairs", **options)

    planned = plan()
    assert planned.plan.workload.inputs[1].shape == (2,) and f"{module}:pairs" in planned.plan.command
    planned.run((), out=tmp_path / "whole")
    interrupt(plan(), tmp_path / "run")
    snugfit.resume(tmp_path / "run", ())
    assert_same(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run")))
    loaded, inputs = snugfit.load(tmp_path / "run"), (torch.zeros(2, 3, 8, 8), torch.ones(2, 2))
    logits: Tensor = loaded(*inputs)
    assert logits.shape == (2, 2)
    recorded = json.loads((tmp_path / "whole" / "record.json").read_text())["accuracy"]["val"]
    assert snugfit.evaluate(tmp_path / "whole", split="val")["accuracy"] == recorded
    with pytest.raises(DataError, match="whole has items of another shape than the model was trained on"):
        snugfit.evaluate(tmp_path / "whole", data=f"{module}:whole", split="val")


def test_data_that_prepares_images_otherwise_is_refused(module: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": "backprop", "epochs": 1, "threads": 1, "image_size": 8}
    snugfit.plan("smallconv", f"{module}:whole", **options).run((), out=tmp_path / "run")
    assert snugfit.evaluate(tmp_path / "run", split="val")["count"] == 4
    with pytest.raises(DataError, match=r"prepared prepares images otherwise than the run's data did \(as_is=True\)"):
        snugfit.evaluate(tmp_path / "run", data=f"{module}:prepared", split="val")
