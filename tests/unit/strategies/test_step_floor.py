"""The floor of a step, which is counted in one pass, against steps that run one after another."""

import pytest
import torch
from strategy_samples import workload
from torch import nn

from snugfit._core.workload import OptimizerSettings
from snugfit._training.network import NetworkTrainer
from snugfit.lean.bfloat16_weights import store_bfloat16
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.memory_estimates import step_floor

IMAGES = 16


def made_trainer(changes, *, hold):
    """A trainer whose second layer's weight outweighs the feature maps, so that state and gradients show."""
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    work = workload(**changes)
    if work.weight_dtype == "bfloat16":
        store_bfloat16(network)
    return NetworkTrainer(network.to("meta"), network.forward, work, 2 if hold else 1)


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
    found = step_floor(trainer, [trainer.optimizers], batch, hold=hold)
    assert found == two_steps(made_trainer(changes, hold=hold), hold=hold)
    assert found > two_weights(trainer)


def two_weights(trainer):
    return 2 * sum(each.nbytes for each in trainer.module.parameters())
