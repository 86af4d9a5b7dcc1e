"""The lean end of a unit trains it as the stock layers do, with fewer maps."""

import copy

import pytest
import torch
from torch import nn

from snugfit._chain import Chain, split_tail
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit.lean import FusedNormAct, FusedPoolNormAct
from snugfit.local import NetworkStats, UnitShape, build_local_loss
from snugfit.local.assignment import parts
from snugfit.local.unit_pass import training_pass
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
    return build_local_loss(name, UnitShape(unit.output_shape, False, unit.map_shape), NetworkStats(8, 8, 5))


def images():
    torch.manual_seed(2)
    return torch.randn(6, 3, 16, 16).to(memory_format=torch.channels_last), torch.tensor([0, 1, 2, 3, 4, 0])


@pytest.mark.parametrize("name", ["lls-mxm", "linear", "lls"])
def test_weights_after_steps_are_those_of_the_stock_layers(name):
    workload = Workload("m", "d", (3, 16, 16), 5, 6, 1, 1, optimizer=OptimizerSettings("sgd", lr=0.1))
    seen = []
    for lean in ("pooled", "overwritten", ""):
        unit = copy.deepcopy(chain().units[0])
        local = LocalUnit(unit.module, loss_of(unit, name), workload)
        if lean != "pooled":
            local.loss.pooled_side, local.loss.gives_up_gradient = None, lean == "overwritten"
            local._training_pass = training_pass(local.body, local.tail, local.loss)
        kinds = {type(module) for module in local._training_pass.modules()}
        assert (FusedPoolNormAct in kinds, FusedNormAct in kinds) == (lean == "pooled", bool(lean))
        for _ in range(3):
            outputs, _ = local.step(*images())
        seen.append([outputs, *local.state().values()])
    for pooled, overwritten, stock in zip(*seen, strict=True):
        torch.testing.assert_close(pooled, stock, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(overwritten, stock, rtol=1e-4, atol=1e-5)


def endings(body, loss):
    found = training_pass(body, nn.Identity(), loss)
    return [type(module) for module in found.modules() if isinstance(module, (FusedNormAct, FusedPoolNormAct))]


def test_what_ends_otherwise_is_left_alone():
    made = chain()
    loss = loss_of(made.units[0], "lls")
    assert endings(made.units[1].module, loss) == [], "no norm"
    assert endings(made.units[0].module, loss) == [], "a pool after the activation"
    assert endings(split_tail(made.units[0].module)[0], loss) == [FusedPoolNormAct, FusedNormAct]
    loss.pooled_side = None
    assert endings(split_tail(made.units[0].module)[0], loss) == [FusedNormAct]
    loss.gives_up_gradient = False
    assert endings(split_tail(made.units[0].module)[0], loss) == []


def test_a_norm_that_reads_anything_but_a_convolution_does_not_overwrite_it():
    body = Chain.from_module(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(),
                      nn.Linear(1024, 5)), (3, 16, 16)
    ).units[0].module  # fmt: skip
    torch.manual_seed(1)
    loss = build_local_loss("lls", UnitShape((4, 16, 16)), NetworkStats(8, 8, 5))
    assert endings(body, loss) == [FusedNormAct]


class Watched(nn.LeakyReLU):
    """A class of the user's own, which may compute anything."""

    def forward(self, x):
        return super().forward(x) + 1.0


class Squashing(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).sigmoid()


@pytest.mark.parametrize("change", ["activation", "convolution", "hook"])
def test_layers_that_may_do_more_than_torchs_are_left_alone(change):
    conv = (Squashing if change == "convolution" else nn.Conv2d)(3, 8, 3, padding=1)
    activation, norm = Watched() if change == "activation" else nn.LeakyReLU(), nn.BatchNorm2d(8)
    if change == "hook":
        norm.register_forward_hook(lambda module, inputs, output: None)
    body = Chain.from_module(
        nn.Sequential(conv, norm, activation, nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(1568, 5)), (3, 16, 16)
    ).units[0]
    found = endings(body.module, loss_of(body, "lls"))
    assert found == ([FusedNormAct] if change == "convolution" else [])


@pytest.mark.parametrize("name", ["lls", "linear", "aan"])
@pytest.mark.parametrize("activation", [nn.LeakyReLU, nn.SiLU])
def test_dropout_in_place_is_not_seen_by_the_loss(name, activation):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), activation(), nn.Dropout(0.5, inplace=True),
        nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(1568, 5),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    unit = Chain.from_module(network, (3, 16, 16)).units[0]
    loss = loss_of(unit, name)
    inputs, _ = images()
    body, tail = parts(unit.module, loss)
    features, outputs = training_pass(body, tail, loss)(inputs)
    expected = activation()(copy.deepcopy(network[1])(network[0](inputs)))
    if name == "aan":
        assert (outputs == 0).any()
        return
    torch.testing.assert_close(loss.predict(features), loss.predict(expected))
    assert (outputs == 0).float().mean() > 0.3


def test_evaluation_is_that_of_the_unit():
    unit = chain().units[0]
    body, tail = parts(unit.module, loss_of(unit, "lls"))
    unit.module.eval()
    inputs, _ = images()
    assert torch.equal(tail(body(inputs)), unit.module(inputs))


def step_peak(lean):
    """Peak tensor bytes of a step of the first unit, of 64 images, in maps of its convolution."""
    workload = Workload("m", "d", (3, 16, 16), 5, 6, 1, 1)
    unit = copy.deepcopy(chain().units[0])
    loss = loss_of(unit, "lls").to("meta")
    if lean != "pooled":
        loss.pooled_side, loss.gives_up_gradient = None, lean == "overwritten"
    local = LocalUnit(unit.module.to("meta"), loss, workload)
    inputs = torch.empty(64, 3, 16, 16, device="meta")
    labels = torch.empty(64, dtype=torch.int64, device="meta")
    peak = tensor_peak_bytes(lambda: local.step(inputs, labels), [unit.module, loss, inputs])
    return peak / (4 * 64 * 8 * 16 * 16)


def test_a_step_holds_fewer_maps():
    """The inputs (3/8 of a map), the convolution's output and the pooled output (1/4): a pooled one needs no more."""
    pooled, overwritten, stock = (step_peak(lean) for lean in ("pooled", "overwritten", ""))
    assert pooled < 2.0 < overwritten < stock - 1.0
