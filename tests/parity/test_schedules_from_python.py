"""Runs by a schedule that was passed from Python: they are those of the same schedule by name, and can be resumed."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import SHORT, assert_same, interrupt, network, weights
from safetensors.torch import load_file

import snugfit
from snugfit._training.own_parts import OwnParts, factor_of
from snugfit.errors import InterruptedRunError, UnknownNameError, UsageError


def cosine(step: int, steps: int) -> float:
    """Half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * step / steps))


@pytest.mark.parametrize("strategy", ["backprop", "blockwise"])
def test_a_schedule_from_python_is_the_one_by_name(tmp_path: Path, strategy: str) -> None:
    named = weights(tmp_path / "a", strategy=strategy)
    assert_same(named, weights(tmp_path / "b", strategy=strategy, schedule=cosine))
    constant = weights(tmp_path / "c", strategy=strategy, schedule=lambda step, steps: 1)
    assert any(not torch.equal(named[name], constant[name]) for name in named)


def test_a_resumed_run_takes_the_schedule_again(tmp_path: Path) -> None:
    whole = weights(tmp_path / "whole", schedule=cosine, strategy="backprop")
    plan = snugfit.plan(network(), "digits", schedule=cosine, strategy="backprop", **SHORT)
    assert plan.plan.workload.optimizer.schedule == "python" and plan.plan.command is None
    interrupt(plan, tmp_path / "run")
    with pytest.raises(UsageError, match="schedule of your own; pass it again"):
        snugfit.resume(tmp_path / "run", (), model=network())
    with pytest.raises(UnknownNameError, match="Did you mean 'schedule'"):
        snugfit.resume(tmp_path / "run", (), model=network(), shedule=cosine)
    snugfit.resume(tmp_path / "run", (), model=network(), schedule=cosine)
    assert_same(whole, load_file(tmp_path / "run" / "model.safetensors"))


def test_a_plan_by_a_name_takes_no_function_later(tmp_path: Path) -> None:
    stop = snugfit.StopFlag()
    stop.request()
    with pytest.raises(InterruptedRunError):
        snugfit.plan(network(), "digits", strategy="backprop", **SHORT).run((), out=tmp_path, stop=stop)
    with pytest.raises(UsageError, match="trained by --schedule cosine; leave out schedule="):
        snugfit.resume(tmp_path, (), model=network(), schedule=cosine)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": lambda step, steps: math.nan}, "schedule= returned nan in step 0 of 6"),
        ({"schedule": lambda step, steps: 1 - 2 * step / steps}, "schedule= returned -0.333333 in step 4 of 6"),
        ({"schedule": lambda step: 1.0}, "schedule= failed in step 0 of 6: TypeError"),
        ({"schedule": lambda step, steps: None}, "schedule= failed in step 0 of 6: TypeError"),
        ({"schedule": "python"}, "schedule='python' is a schedule from Python: pass the function itself"),
        ({"schedule": cosine, "warmup_epochs": 1}, "not supported with --schedule python, which rises by itself"),
        ({"schedule": cosine, "optimizer": "schedulefree"}, "schedulefree has no --schedule python"),
        ({"focal_gamma": 3}, "--focal-gamma 3 is for --loss focal"),
    ],
)
def test_what_is_no_schedule_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        snugfit.plan(network(), "digits", strategy="backprop", **{**SHORT, **options})


def test_a_schedule_is_tried_at_the_steps_of_the_run() -> None:
    table, tried = [1.0] * 6, []
    planned = snugfit.plan(network(), "digits", strategy="backprop", schedule=lambda step, _: table[step], **SHORT)

    def note(step: int, steps: int) -> float:
        tried.append((step, steps))
        return 1.0

    OwnParts(schedule=note).check(planned.plan.workload, torch.device("cpu"))
    assert tried == [(step, 6) for step in range(6)]
    tried.clear()
    OwnParts(schedule=note).check(dataclasses.replace(planned.plan.workload, epochs=70), torch.device("cpu"))
    assert len(set(tried)) == 100 and tried[0] == (0, 210) and tried[-1] == (209, 210)


def test_a_factor_is_a_number_of_at_least_zero() -> None:
    assert factor_of(lambda step, steps: torch.tensor(step / steps), 1, 4) == 0.25
