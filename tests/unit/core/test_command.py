"""The command that runs a plan parses back to the request it was made from."""

import shlex
from dataclasses import replace

import pytest
from core_samples import PLAN

from snugfit._cli.app import build
from snugfit._core.explanation import PLACEHOLDER, command_of, flags_of
from snugfit._core.option_groups import (
    FROM_PYTHON,
    BudgetOptions,
    DataOptions,
    MachineOptions,
    ModelOptions,
    TrainingOptions,
)
from snugfit._core.plan import Candidate
from snugfit._core.request import Request, StrategyOptions


def parsed(command):
    _, bound, _ = build().parse_args(list(command), exit_on_error=False, print_error=False)
    return bound


def plan_of(strategy, **settings):
    return replace(PLAN, candidates=(Candidate(strategy, True, settings),))


FULL = Request(
    ModelOptions("vgg11", "my weights.pth"), DataOptions("folder:my 'photos'", max_train=9),
    BudgetOptions("100MB", storage="1GB"),
    TrainingOptions(epochs=3, lr=1e-05, augment=False, erase=0.1), StrategyOptions(saturation_stop=True, aim="memory"),
    MachineOptions(threads=1),
)  # fmt: skip


@pytest.mark.parametrize("request_", [Request(), FULL])
def test_the_command_is_the_request_with_the_strategy_named(request_):
    command = command_of(request_, plan_of("blockwise"))
    name, *rest = shlex.split(shlex.join(command))
    found = parsed(rest).arguments["flags"].request()
    assert name == "snugfit" and rest[0] == "train"
    assert found == replace(request_, strategy=replace(request_.strategy, strategy="blockwise"))


def test_defaults_are_left_out():
    assert flags_of(Request()) == ()
    assert command_of(Request(), plan_of("backprop")) == ("snugfit", "train", "--strategy", "backprop")


def test_several_processes_are_launched():
    request = Request(budget=BudgetOptions(devices=2))
    command = shlex.join(command_of(request, plan_of("tiled", processes=2)))
    assert command == "snugfit cluster launch --processes 2 -- train --devices 2 --strategy tiled"
    launched = parsed(shlex.split(command)[1:]).args
    assert parsed(launched).arguments["flags"].request().strategy.strategy == "tiled"


def test_an_optimizer_that_naming_would_change_is_named_too():
    command = command_of(Request(model=ModelOptions(weights="w.pth")), plan_of("sidenet"))
    assert command[command.index("--optimizer") + 1] == PLAN.workload.optimizer.name
    named = Request(strategy=StrategyOptions("sidenet"))
    assert "--optimizer" not in command_of(named, plan_of("sidenet"))


def test_data_take_the_place_of_their_shape():
    request = Request.of(model="resnet18", input_shape="3x48x48", classes=100, memory="200MB")
    rest = command_of(request, plan_of("backprop"))[1:]
    assert "--input-shape" not in rest and rest[rest.index("--data") + 1] == PLACEHOLDER
    named = ["cifar100" if word == PLACEHOLDER else word for word in rest]
    found = parsed(named).arguments["flags"].request()
    same = {"model": "resnet18", "classes": 100, "memory": "200MB", "strategy": "backprop"}
    assert found == Request.of(data="cifar100", image_size=48, **same)


def test_where_there_is_no_command():
    assert command_of(Request(), replace(PLAN, chosen=None)) is None
    assert command_of(Request(model=ModelOptions(FROM_PYTHON)), PLAN) is None
    assert command_of(Request(data=DataOptions(FROM_PYTHON)), PLAN) is None


def test_options_of_other_strategies_are_left_out():
    """With ``auto`` they held for another strategy than the chosen one, which would refuse them."""
    request_ = Request.of(local_loss="lls", rho=0.3, accumulate=False)
    assert command_of(request_, plan_of("backprop")) == (
        "snugfit",
        "train",
        "--strategy",
        "backprop",
        "--no-accumulate",
    )
    assert command_of(request_, plan_of("blockwise"))[2:] == (
        "--strategy",
        "blockwise",
        "--local-loss",
        "lls",
        "--rho",
        "0.3",
    )
