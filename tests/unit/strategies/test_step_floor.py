"""The floor of a step, which is counted in one pass, against steps that run one after another."""

import pytest
import torch
from strategy_samples import workload
from torch import nn

from snugfit._core.workload import OptimizerSettings
from snugfit._training.network import NetworkTrainer
from snugfit.lean.bfloat16_weights import store_bfloat16
from snugfit.lean.update_rules import FusedSGD
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.step_floor import network_floor

IMAGES = 16


class Spare(nn.Sequential):
    """Has a layer that is never called, as large as the others together."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.spare = nn.Linear(1024, 80)

    def forward(self, images):
        for layer in list(self)[:-1]:
            images = layer(images)
        return images


def made_trainer(changes, *, hold, kind=nn.Sequential, optimizer=None):
    """A trainer whose second layer's weight outweighs the feature maps, so that state and gradients show."""
    network = kind(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    work = workload(**changes)
    if work.weight_dtype == "bfloat16":
        store_bfloat16(network)
    return NetworkTrainer(network.to("meta"), network.forward, work, 2 if hold else 1, optimizer=optimizer)


def batch():
    return torch.empty(IMAGES, 3, 8, 8, device="meta"), torch.zeros(IMAGES, dtype=torch.int64, device="meta")


def two_steps(trainer, *, hold):
    def step():
        trainer.step(*batch(), share=0.5 if hold else 1.0, update=not hold)
        if hold:
            trainer.step(*batch(), share=0.5, update=True)

    return tensor_peak_bytes(step, trainer.modules, repeats=2)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": OptimizerSettings("adamw")},
        {"optimizer": OptimizerSettings("adamw", state="int8")},
        {"optimizer": OptimizerSettings("schedulefree", schedule="constant")},
        {"optimizer": OptimizerSettings(ema=0.9)},
        {"weight_dtype": "bfloat16"},
        {"clip_norm": 1.0},
    ],
)
def test_the_floor_is_the_peak_of_the_second_step(changes, hold):
    """State, averages and gradients of an earlier micro-batch are there when the only pass begins."""
    trainer = made_trainer(changes, hold=hold)
    assert network_floor(trainer, batch, hold=hold) == two_steps(made_trainer(changes, hold=hold), hold=hold)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": OptimizerSettings("adamw")},
        {"optimizer": OptimizerSettings(ema=0.9)},
        {"optimizer": OptimizerSettings("schedulefree", schedule="constant")},
    ],
)
def test_a_layer_that_is_never_called_has_neither_state_nor_gradient(changes, hold):
    trainers = [made_trainer(changes, hold=hold, kind=Spare) for _ in range(2)]
    found = network_floor(trainers[0], batch, hold=hold)
    assert found == two_steps(trainers[1], hold=hold)
    spare = sum(each.nbytes for each in trainers[0].module.spare.parameters())
    assert found == network_floor(made_trainer(changes, hold=hold), batch, hold=hold) + spare


class Slow(FusedSGD):
    """A rule of the caller's, whose state comes with the second step."""

    def begin(self, parameter):
        if "seen" in self.state:
            super().begin(parameter)
        self.state["seen"] = torch.zeros(())
        self._is_first = True

    def _of_parameter_shape(self):
        return [self.state[name] for name in self.names if name in self.state]


@pytest.mark.parametrize("hold", [False, True])
def test_a_rule_from_python_has_made_one_step(hold):
    trainers = [made_trainer({}, hold=hold, optimizer=lambda name, parameter: Slow(0.1, 0.9)) for _ in range(2)]
    assert network_floor(trainers[0], batch, hold=hold) == two_steps(trainers[1], hold=hold)


@pytest.mark.parametrize("hold", [False, True])
def test_a_trainer_that_keeps_gradients_elsewhere_runs_both_steps(hold):
    trainers = [made_trainer({}, hold=hold) for _ in range(2)]
    steps, step = [], trainers[0].step
    trainers[0].floor_in_one_pass = False
    trainers[0].step = lambda *args: steps.append(args[2:]) or step(*args)
    assert network_floor(trainers[0], batch, hold=hold) == two_steps(trainers[1], hold=hold)
    assert steps == 2 * ([(0.5, False), (0.5, True)] if hold else [(1.0, True)])
