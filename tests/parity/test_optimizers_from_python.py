"""Runs by an optimizer that was passed from Python: they are those of a plain loop with it, and can be resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decaying_momentum import DecayingMomentum
from parity_helpers import SHORT, assert_same, interrupt, network, train_plainly, weights
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer, RMSprop

import snugfit
from snugfit.errors import CheckpointError, InfeasibleBudgetError, InterruptedRunError, UsageError

rmsprop = partial(RMSprop, lr=1e-3, momentum=0.9, centered=True)
OWN = ["rmsprop", "groups", "adafactor", "numbers"]
DEFAULTS: dict[str, Any] = {**SHORT, "strategy": "backprop", "seed": 3, "schedule": "constant", "keep": "last"}


def by_name(group: list[tuple[str, nn.Parameter]]) -> Optimizer:
    """AdamW that trains the head slowly, and leaves biases without weight decay."""
    ((name, parameter),) = group
    lr = 1e-3 if name.startswith("3.") else 1e-2
    return AdamW(group, lr=lr, weight_decay=0.1 if parameter.dim() > 1 else 0.0)


def grouped(parameters: list[tuple[str, nn.Parameter]]) -> Optimizer:
    """One AdamW of the same groups."""
    return AdamW([by_name([each]).param_groups[0] for each in parameters])


@pytest.mark.parametrize("strategy", ["backprop", "checkpoint"])
@pytest.mark.parametrize(
    ("own", "plain"),
    [(rmsprop, rmsprop), (by_name, grouped), (partial(AdamW, lr=0.01, fused=True),) * 2],
    ids=["rmsprop", "groups", "fused"],
)
def test_a_run_is_the_plain_loop_to_the_bit(tmp_path: Path, strategy: str, own: Any, plain: Any) -> None:
    stock = network().to(memory_format=torch.channels_last)
    expected = train_plainly(stock, DEFAULTS, make=lambda model: plain([*model.named_parameters()]))
    found = weights(tmp_path / "a", **{**DEFAULTS, "strategy": strategy, "optimizer": own})
    assert_same(expected, found)
    start = network().state_dict()
    assert all((found[name] - start[name]).abs().max() > 1e-3 for name in start)


def test_held_gradients_are_applied_by_it(tmp_path: Path) -> None:
    whole = weights(tmp_path / "a", **DEFAULTS, optimizer=rmsprop)
    assert_same(whole, weights(tmp_path / "b", **DEFAULTS, optimizer=rmsprop, clip_norm=1e6), tolerance=1e-5)


def test_the_average_of_weights_is_that_of_the_optimizer_by_name(tmp_path: Path) -> None:
    options = {**DEFAULTS, "ema": 0.5}
    named = weights(tmp_path / "a", **options, optimizer="adamw", lr=0.01, weight_decay=0.1)
    own = weights(tmp_path / "b", **options, optimizer=partial(AdamW, lr=0.01, weight_decay=0.1, fused=True))
    assert_same(named, own)


@pytest.mark.parametrize("own", [rmsprop, by_name, Adafactor, DecayingMomentum], ids=OWN)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, own: Callable[..., Optimizer]) -> None:
    options = {**DEFAULTS, "optimizer": own, "schedule": "cosine"}
    whole = weights(tmp_path / "whole", **options)
    plan = snugfit.plan(network(), "digits", **options)
    assert plan.plan.workload.optimizer.name == "python" and plan.plan.command is None
    interrupt(plan, tmp_path / "run")
    snugfit.resume(tmp_path / "run", (), model=network(), optimizer=own)
    assert_same(whole, load_file(tmp_path / "run" / "model.safetensors"))


def test_a_resumed_run_takes_the_optimizer_again(tmp_path: Path) -> None:
    interrupt(snugfit.plan(network(), "digits", **DEFAULTS, optimizer=rmsprop), tmp_path)
    with pytest.raises(UsageError, match=r"by an optimizer of your own; pass it again: .*optimizer="):
        snugfit.resume(tmp_path, (), model=network())
    with pytest.raises(UsageError, match="optimizer= is 'sgd'; pass a function"):
        snugfit.resume(tmp_path, (), model=network(), optimizer="sgd")
    with pytest.raises(CheckpointError, match="model, data or the optimizer's state have changed"):
        snugfit.resume(tmp_path, (), model=network(), optimizer=SGD)


def test_a_run_by_a_name_takes_no_optimizer_later(tmp_path: Path) -> None:
    stop = snugfit.StopFlag()
    stop.request()
    with pytest.raises(InterruptedRunError):
        snugfit.plan(network(), "digits", **DEFAULTS).run((), out=tmp_path, stop=stop)
    with pytest.raises(UsageError, match="trained by --optimizer sgd; leave out optimizer="):
        snugfit.resume(tmp_path, (), model=network(), optimizer=rmsprop)


@pytest.mark.parametrize("own", [rmsprop, partial(AdamW, lr=1e-3), Adafactor], ids=["rmsprop", "adamw", "adafactor"])
def test_a_run_stays_within_its_prediction_and_its_state_counts(tmp_path: Path, own: Any) -> None:
    """Of 4.7 MB of weights, most are in one layer, whose step has the temporaries of the optimizer."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 2000), nn.ReLU())
    wide.append(nn.Linear(2000, 10))
    options = {**DEFAULTS, "optimizer": own, "memory": "80MB"}
    plan = snugfit.plan(wide, "digits", **options)
    shares = {"rmsprop": 3.0, "adamw": 2.0, "adafactor": 0.01}
    name = "rmsprop" if own is rmsprop else "adamw" if own is not Adafactor else "adafactor"
    assert plan.plan.workload.optimizer.state_per_parameter == pytest.approx(shares[name], abs=0.01)
    record = plan.run((), out=tmp_path)
    assert record.measured["peak_bytes"] <= record.predicted["peak_bytes"] <= 80_000_000


@pytest.mark.parametrize("own", [partial(AdamW, lr=1e-3), partial(AdamW, fused=True), Adafactor])
def test_the_smallest_budget_is_one_that_works(tmp_path: Path, own: Any) -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 20_000), nn.ReLU(), nn.Linear(20_000, 10))
    options = {**DEFAULTS, "optimizer": own}
    with pytest.raises(InfeasibleBudgetError) as refused:
        snugfit.plan(wide, "digits", **options, memory="12MB").run((), out=tmp_path / "a")
    smallest = refused.value.smallest_bytes
    record = snugfit.plan(wide, "digits", **options, memory=smallest).run((), out=tmp_path / "b")
    assert record.measured["peak_bytes"] <= smallest


@pytest.mark.parametrize("strategy", ["blockwise", "elastic", "sidenet", "tiled", "feedback"])
def test_other_strategies_refuse_it(strategy: str) -> None:
    options = {**SHORT, "strategy": strategy, "optimizer": rmsprop}
    with pytest.raises(UsageError, match="does not support --optimizer python; use backprop or checkpoint"):
        snugfit.plan(network(), "digits", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer_state": "int8"}, "--optimizer-state int8 .* an optimizer of your own"),
        ({"optimizer_state": "bfloat16"}, "--optimizer-state bfloat16 .* an optimizer of your own"),
        ({"weight_dtype": "bfloat16"}, "--weight-dtype bfloat16 .* an optimizer of your own"),
        ({"lr": 0.1}, "--lr .* an optimizer of your own"),
        ({"weight_decay": 0.1}, "--weight-decay .* an optimizer of your own"),
        ({"optimizer": "python"}, "optimizer='python' is an optimizer from Python: pass the function itself"),
        ({"optimizer": SGD(network().parameters())}, r"or a function, not SGD: .*partial\(torch\.optim\.SGD"),
        ({"optimizer": 3}, "or a function, not int"),
        ({"optimizer": lambda group: None}, r"returned NoneType for the parameter '0\.weight'"),
        ({"optimizer": lambda group: 1 / 0}, r"failed for the parameter '0\.weight'.*ZeroDivisionError"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS needs a closure"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        snugfit.plan(network(), "digits", **{**SHORT, "strategy": "backprop", "optimizer": rmsprop, **options})


def test_an_own_loop_takes_names() -> None:
    example = (torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))
    step = snugfit.fit(network(), nn.CrossEntropyLoss(), example=example, memory="60MB", optimizer=rmsprop)
    with pytest.raises(UsageError, match=r"takes 'sgd' or 'adamw', not partial: .*memory\.MemoryLimit"), step:
        pass


def test_no_measurement_of_it_is_kept() -> None:
    """Its measurements may be those of another function."""
    made: list[str] = []

    def noted(group: list[tuple[str, nn.Parameter]]) -> Optimizer:
        if not group[0][1].is_meta:
            made.append(group[0][0])
        return RMSprop(group)

    plan = snugfit.plan(network(), "digits", strategy="backprop", optimizer=noted, **SHORT)
    once = len(made)
    snugfit.plan(network(), "digits", strategy="backprop", optimizer=noted, **SHORT)
    assert len(made) == 2 * once and set(made) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    (trial,) = plan.compare(steps=1)
    assert trial.error is None
