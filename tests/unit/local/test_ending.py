"""The lean end of a unit trains it as the stock layers do, with fewer maps."""

import copy

import pytest
import torch
from torch import nn

from snugfit.chain import Chain
from snugfit.core.workload import OptimizerSettings, Workload
from snugfit.lean import NormActivation
from snugfit.local import NetworkFacts, UnitShape, build_local_loss
from snugfit.local.ending import with_lean_ending
from snugfit.local.layout import parts
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.blockwise.worker import LocalUnit


def chain():
    torch.manual_seed(0)
    return Chain.from_module(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5),
        ).to(memory_format=torch.channels_last),
        (3, 16, 16),
    )  # fmt: skip


def loss_of(unit, name):
    torch.manual_seed(1)
    return build_local_loss(name, UnitShape(unit.output_shape, False, unit.map_shape), NetworkFacts(8, 8, 5))


def images():
    torch.manual_seed(2)
    return torch.randn(6, 3, 16, 16).to(memory_format=torch.channels_last), torch.tensor([0, 1, 2, 3, 4, 0])


@pytest.mark.parametrize("name", ["lls-mxm", "linear", "lls"])
def test_weights_after_steps_are_those_of_the_stock_layers(name):
    workload = Workload("m", "d", (3, 16, 16), 5, 6, 1, 1, optimizer=OptimizerSettings("sgd", lr=0.1))
    seen = []
    for lean in (True, False):
        unit = copy.deepcopy(chain().units[0])
        local = LocalUnit(unit.module, loss_of(unit, name), workload)
        assert any(isinstance(module, NormActivation) for module in local.body.modules())
        if not lean:
            local.loss.gives_up_gradient = False
            local.body, local.tail = parts(unit.module, local.loss)
            assert not any(isinstance(module, NormActivation) for module in local.body.modules())
        for _ in range(3):
            outputs, _ = local.step(*images())
        seen.append([outputs, *local.state().values()])
    for mine, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_body_that_ends_otherwise_is_left_alone():
    made = chain()
    assert with_lean_ending(made.units[1].module) is made.units[1].module
    whole = made.units[0].module
    assert with_lean_ending(whole) is whole, "it ends in a pool"


def test_evaluation_is_that_of_the_unit():
    unit = chain().units[0]
    body, tail = parts(unit.module, loss_of(unit, "lls"))
    unit.module.eval()
    inputs, _ = images()
    assert torch.equal(tail(body(inputs)), unit.module(inputs))


def step_peak(lean):
    """Peak tensor bytes of a step of the first unit, of 64 images."""
    workload = Workload("m", "d", (3, 16, 16), 5, 6, 1, 1)
    unit = copy.deepcopy(chain().units[0])
    loss = loss_of(unit, "lls:limit=32").to("meta")
    loss.gives_up_gradient = lean
    local = LocalUnit(unit.module.to("meta"), loss, workload)
    inputs = torch.empty(64, 3, 16, 16, device="meta")
    labels = torch.empty(64, dtype=torch.int64, device="meta")
    return tensor_peak_bytes(lambda: local.step(inputs, labels), [unit.module, loss, inputs])


def test_a_step_holds_fewer_maps_than_with_stock_layers():
    """Backward holds two maps instead of four; what then holds most is the pool's forward pass, with its indices."""
    map_bytes = 4 * 64 * 8 * 16 * 16
    assert 1.4 < (step_peak(lean=False) - step_peak(lean=True)) / map_bytes <= 2.0
