"""The experiment with couplings of modules."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from benchmarks import coupling
from benchmarks.common import Settings

from snugfit._data import load

MODELS = {"none": 0, "reconstruction": 0, "context": 1 * 12 * 9 + 2 * 12 + 12 * 16 * 9 + 16}
TRAINED = {"none": 0, "reconstruction": 16 * 12 * 9 + 2 * 12 + 12 * 1 * 9 + 1, "context": 0}


def settings_of(**changes: object) -> Settings:
    return {
        "model": "resnet20", "data": "digits", "max_train": 64, "max_val": 40, "epochs": 1, "lr": 0.05, "seed": 0,
        "batch_size": 32, "modules": 2, "local_loss": "aan", "coupling": "none", **changes,
    }  # fmt: skip


def divided(**changes: object) -> tuple[coupling.Divided, Settings]:
    settings = settings_of(**changes)
    return coupling.Divided.of(settings, load("digits", max_train=64, max_val=40)), settings


@pytest.mark.parametrize("name", ["reconstruction", "context"])
def test_a_coupling_trains_its_layers_and_leaves_the_neighbour_alone(name: str) -> None:
    network, settings = divided(coupling=name)
    layout = network.on_cpu(settings)
    module = coupling.made(layout, 1 if name == "context" else 0, settings)
    neighbour = layout.modules[0 if name == "context" else 1].module
    before = copy.deepcopy(neighbour.state_dict())
    layers = module.encoder if name == "context" else module.decoder
    assert layers is not None
    start = [parameter.detach().clone() for parameter in layers.parameters()]
    shape = (4, *layout.modules[1 if name == "context" else 0].input_shape)
    coupling.Trainer(module, 0.1).step(torch.randn(shape), torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))
    assert all(not torch.equal(a, b) for a, b in zip(start, layers.parameters(), strict=True))
    assert all(torch.equal(value, neighbour.state_dict()[key]) for key, value in before.items())


def test_reconstruction_counts_less_towards_the_last_module() -> None:
    network, settings = divided(coupling="reconstruction", modules=4)
    layout = network.on_cpu(settings)
    weights = [coupling.made(layout, index, settings).weight for index in range(4)]
    assert weights == pytest.approx([1, 2 / 3, 1 / 3, 0])


def test_the_objective_is_the_local_loss_plus_the_squared_error_of_the_image() -> None:
    network, settings = divided(coupling="reconstruction")
    module = coupling.made(network.on_cpu(settings), 0, settings).eval()
    features, images, labels = torch.randn(2, 16, 8, 8), torch.randn(2, 1, 8, 8), torch.tensor([3, 4])
    assert module.decoder is not None
    error = (module.decoder(features) - images).square().mean()
    expected = module.loss(features, labels).loss + error
    torch.testing.assert_close(module.objective(features, images, labels), expected)


def test_statistics_are_those_of_the_last_batches() -> None:
    network, settings = divided()
    module = coupling.made(network.on_cpu(settings), 0, settings)
    inputs, labels = torch.randn(32, 1, 8, 8) * 3 + 1, torch.zeros(32, dtype=torch.int64)
    coupling.settle(module, coupling.Rows(inputs, inputs, labels), settings)
    stem = next(each for each in module.body.modules() if isinstance(each, torch.nn.Conv2d))
    norm = next(each for each in module.body.modules() if isinstance(each, torch.nn.BatchNorm2d))
    assert norm.running_mean is not None and not module.training
    torch.testing.assert_close(norm.running_mean, stem(inputs).mean((0, 2, 3)), atol=1e-5, rtol=1e-4)


@functools.cache
def arm(name: str) -> dict[str, Any]:
    return coupling.run_arm(settings_of(coupling=name), None)


@pytest.mark.parametrize("name", ["none", "reconstruction", "context"])
def test_an_arm_reports_accuracy_bytes_and_parameters(name: str) -> None:
    found, plain = arm(name), arm("none")
    assert 0 <= found["test"] <= 1 and found["val"] == found["exits"][-1] and len(found["exits"]) == 2
    assert found["trained_parameters"] - plain["trained_parameters"] == TRAINED[name]
    assert found["model_parameters"] - plain["model_parameters"] == MODELS[name]
    assert (max(found["peak_bytes"]) > max(plain["peak_bytes"])) == (name == "context")
    assert sum(found["peak_bytes"]) >= sum(plain["peak_bytes"])
    row = coupling.render([{"settings": settings_of(coupling=name), **found}]).splitlines()[-1]
    assert f"| 2 | aan | {name} |" in row
