"""Runs of networks that cannot be divided: initial weights, buffers, options that are refused, and what reads units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from whole_nets import OnData, SameLayerTwice, Tied

import snugfit
from snugfit._api import profile_request
from snugfit._core.request import Request
from snugfit.errors import CheckpointError, InfeasibleBudgetError, ModelError

SETTINGS: dict[str, Any] = {
    "strategy": "backprop", "epochs": 1, "max_train": 64, "max_val": 20, "image_size": 16, "batch_size": 32,
    "lr": 1e-30, "weight_decay": 0.0,
}  # fmt: skip


class Centred(OnData):
    """Reads buffers that its state dict does not hold."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(classes)
        self.register_buffer("order", torch.arange(classes).flip(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, self.order]


class Divisible(nn.Module):
    """The same with units."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, classes)
        self.register_buffer("mean", torch.full((1, 1, 1), 0.3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.second(self.first(x - self.mean).relu()).relu().mean((2, 3)))


class Constants(Divisible):
    """Reads a tensor that is no buffer, and makes one."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(classes)
        self.factor = torch.full((1, 1, 1), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.factor + torch.tensor([[[0.25]]]))


@pytest.mark.parametrize(
    ("make", "by_name"), [(Centred, False), (Centred, True), (Divisible, False), (Divisible, True), (Constants, False)]
)
def test_buffers_outside_of_the_state_dict(make: type[nn.Module], by_name: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = f"{make.__module__}:{make.__name__}" if by_name else make()
    record = snugfit.plan(model, "digits", **SETTINGS).run((), out=tmp_path)
    trained, images = make(), torch.rand(3, 1, 16, 16)
    trained.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(record.model(images), trained.eval()(images))


def test_initial_weights_are_those_of_a_file_with_both_names_of_a_shared_weight(tmp_path: Path) -> None:
    torch.manual_seed(1)
    given = Tied()
    torch.save(given.state_dict(), tmp_path / "both.pth")
    snugfit.plan("whole_nets:Tied", "digits", weights=str(tmp_path / "both.pth"), **SETTINGS).run(
        (), out=tmp_path / "run"
    )
    trained = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(trained["conv.weight"], given.conv.weight) and torch.equal(
        trained["stem.weight"], given.stem.weight
    )


def test_initial_weights_of_other_classes_leave_the_last_layer_new_and_of_another_network_are_refused(
    tmp_path: Path,
) -> None:
    given = OnData(5).state_dict()
    save_file(given, tmp_path / "five.safetensors")
    settings = {**SETTINGS, "weights": str(tmp_path / "five.safetensors")}
    snugfit.plan("whole_nets:OnData", "digits", **settings).run((), out=tmp_path / "run")
    trained = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(trained["stem.weight"], given["stem.weight"]) and trained["fc.weight"].shape == (10, 8)
    save_file({name: tensor for name, tensor in given.items() if "conv" not in name}, tmp_path / "five.safetensors")
    with pytest.raises(CheckpointError, match=r"does not hold conv.weight"):
        snugfit.plan("whole_nets:OnData", "digits", **settings)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weight_dtype": "bfloat16"}, "backprop: --weight-dtype bfloat16 rounds weights that layers alone read"),
        ({"batch_norm": "exact"}, "backprop: --batch-norm exact: needs units, and SameLayerTwice cannot be divided"),
    ],
)
def test_options_that_need_layers_or_units_are_refused(options: dict[str, Any], reason: str) -> None:
    planned = snugfit.plan(SameLayerTwice(), "digits", **SETTINGS, **options)
    with pytest.raises(InfeasibleBudgetError, match=reason):
        planned.run(())


@pytest.mark.parametrize("options", [{"activations": "int8"}, {"optimizer_state": "int8"}, {"batch_limit": 16}])
def test_other_options_of_backprop_work(options: dict[str, Any], tmp_path: Path) -> None:
    record = snugfit.plan(Tied(), "digits", **SETTINGS, **options).run((), out=tmp_path)
    assert 0 < record.measured["peak_bytes"] <= record.predicted["peak_bytes"]


def test_the_table_of_units_is_refused() -> None:
    request = Request.of(model="whole_nets:Tied", image_size=16, max_train=64)
    with pytest.raises(ModelError, match="profile measures units, and the network has none: tied weights"):
        profile_request(request)


def test_a_branch_on_data_is_exported_as_weights_and_refused_as_onnx(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    snugfit.plan(OnData(), "digits", **SETTINGS).run((), out=tmp_path / "run")
    exported = snugfit.export(tmp_path / "run", tmp_path / "out", format="safetensors", model=OnData())
    assert load_file(exported["files"][0]).keys() == OnData().state_dict().keys()
    with pytest.raises(ModelError, match=r"torch.onnx cannot export OnData.*--format safetensors"):
        snugfit.export(tmp_path / "run", tmp_path / "out", format="onnx", model=OnData())
    assert "".join(capfd.readouterr()) == "", "torch prints the graph that it cannot export"
