"""What can go wrong with ``elastic``: one clear message, the right exit code, and what the message advises works."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refusal, snug
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import snugfit
from snugfit._core.option_groups import BudgetOptions
from snugfit._core.request import Request, StrategyOptions
from snugfit._engine.builder import make_strategies
from snugfit._training.events import TensorsSelected
from snugfit.errors import (
    CheckpointError,
    InfeasibleBudgetError,
    InfeasibleTimeError,
    OutOfStorageError,
    SnugfitError,
    UnknownNameError,
    UsageError,
)

SMALL = {"max_train": 64, "max_val": 20, "image_size": 16, "batch_size": 32, "epochs": 1, "strategy": "elastic"}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def plan(module: nn.Module | None = None, **options: Any) -> Any:
    return snugfit.plan(net() if module is None else module, "digits", **{**SMALL, **options})


def train(**options: Any) -> list[str]:
    """The arguments of a run."""
    chosen = {**SMALL, "data": "digits", "model": "tiny_nets:cnn", "threads": 1, **options}
    return ["train", *(part for name, value in chosen.items() for part in (f"--{name.replace('_', '-')}", str(value)))]


def test_a_time_ratio_that_is_too_small_names_one_that_works(tmp_path: Path, steady_times: None) -> None:
    with pytest.raises(InfeasibleTimeError) as caught:
        plan(time_ratio=0.01).run((), out=tmp_path / "run")
    smallest = caught.value.smallest_ratio
    assert caught.value.exit_code == 3 and f"{smallest:g}" in str(caught.value) and not (tmp_path / "run").exists()
    record = plan(time_ratio=smallest).run((), out=tmp_path / "run")
    assert len(record.intervals[0].tensors) > 2
    assert record.intervals[0].predicted_seconds <= smallest * record.intervals[0].full_seconds * (1 + 1e-6)
    with pytest.raises(InfeasibleTimeError):
        plan(time_ratio=round(smallest - 0.001, 3)).run((), out=tmp_path / "another")


def test_it_is_told_on_the_command_line(tmp_path: Path) -> None:
    said = refusal(*train(time_ratio=0.01), cwd=tmp_path, code=3)
    assert re.search(r"Smallest time ratio that would do: 0\.\d+", said.splitlines()[0]), said


@pytest.mark.parametrize(
    ("strategy", "scheme"),
    [("backprop", "elastic"), ("elastic", "full"), ("elastic", "head"), ("auto", "bn+bias"), ("blockwise", "full")],
)
def test_a_time_ratio_that_nobody_answers_to_is_refused(strategy: str, scheme: Any) -> None:
    request = Request(budget=BudgetOptions(time_ratio=0.5), strategy=StrategyOptions(strategy, scheme=scheme))
    with pytest.raises(UsageError, match="--time-ratio") as caught:
        make_strategies(request)
    assert caught.value.exit_code == 2


def test_a_time_ratio_means_elastic() -> None:
    timed = Request(budget=BudgetOptions(time_ratio=0.5))
    assert [strategy.name for strategy in make_strategies(timed).strategies] == ["elastic"]
    assert "elastic" not in [strategy.name for strategy in make_strategies(Request()).strategies]
    with pytest.raises(UnknownNameError, match="elastic"):
        make_strategies(Request(strategy=StrategyOptions("elastik")))


@pytest.mark.parametrize("ratio", [0, -0.5, 1.01, float("nan")])
def test_a_ratio_is_a_share_of_a_step(ratio: float) -> None:
    with pytest.raises(UsageError, match="--time-ratio must be"):
        plan(time_ratio=ratio)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scheme": "bias"}, "'bn\\+bias'"),
        ({"scheme": "elastik"}, "Did you mean 'elastic'"),
        ({"importance": "contributions"}, "Did you mean 'contribution'"),
        ({"interval": 0}, "--interval must be a whole number from 1"),
        ({"importance_batch": 0}, "--importance-batch must be a whole number from 1"),
        ({"optimizer": "schedulefree"}, "use sgd or adamw"),
    ],
    ids=str,
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SnugfitError, match=said) as caught:
        plan(**options).run((), out=tmp_path / "run")
    assert caught.value.exit_code in (2, 3) and not (tmp_path / "run").exists()


def test_bad_options_on_the_command_line(tmp_path: Path) -> None:
    assert "full" in refusal(*train(scheme="fulll"), cwd=tmp_path, code=2)
    assert "--time-ratio" in refusal(*train(time_ratio=0.5, scheme="full"), cwd=tmp_path, code=2)


def test_weights_of_another_architecture_are_refused(tmp_path: Path, steady_times: None) -> None:
    other = nn.Sequential(nn.Conv2d(1, 9, 3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 10))
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    for name in ("other", "broken"):
        with pytest.raises(CheckpointError) as caught:
            plan(weights=str(tmp_path / f"{name}.safetensors"), time_ratio=0.9).run((), out=tmp_path / f"run-{name}")
        assert caught.value.exit_code == 4 and f"{name}.safetensors" in str(caught.value)


class CalledTwice(nn.Module):
    """One layer at two places: its time cannot be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.pool, self.last = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.first(images).relu()
        return self.last(self.pool(self.again(self.again(maps).relu()).relu()).flatten(1))


def test_a_layer_that_is_called_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InfeasibleBudgetError, match=r"elastic: needs units, and CalledTwice cannot be divided: .*again"
    ):
        plan(CalledTwice(), time_ratio=0.9).run((), out=tmp_path / "run")


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steady_times: None) -> None:
    """The scratch file of the second ranking has no room; the run goes on once it has."""
    options = {"epochs": 2, "interval": 1, "time_ratio": 0.9}
    plan(**options).run((), out=tmp_path / "whole")
    selected, allocate = [], os.posix_fallocate

    def full(event: object) -> None:
        if isinstance(event, TensorsSelected) and not selected:
            selected.append(event.index)
            monkeypatch.setattr(os, "posix_fallocate", refuse)

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutOfStorageError, match="--cache-dir") as caught:
        plan(**options).run((full,), out=tmp_path / "run")
    assert caught.value.exit_code == 6 and not list((tmp_path / "run" / "cache").glob("*"))
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    snugfit.resume(tmp_path / "run", (), model=net())
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
    assert whole.keys() == resumed.keys() == net().state_dict().keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in resumed.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "model", "memory"),
    [
        ("elastic", "tiny_nets:pooled", "6MB"),
        ("full", "tiny_nets:pooled", "6MB"),
        ("elastic", "vgg8", "20MB"),
        ("full", "vgg8", "20MB"),
    ],
)
def test_a_memory_budget_that_is_too_small_names_one_that_works(
    tmp_path: Path, scheme: str, model: str, memory: str
) -> None:
    """Without a run, tests/unit/strategies/test_elastic_strategy.py has it."""
    options: dict[str, Any] = {"model": model, "image_size": 16, "scheme": scheme}
    options |= {"time_ratio": 1.0} if scheme == "elastic" else {}
    said = refusal(*train(memory=memory, **options), cwd=tmp_path, code=InfeasibleBudgetError.exit_code)
    found = re.search(r"Smallest budget that would do: ([\d.]+) (MB)", said)
    assert found is not None, said
    snug(*train(memory=f"{found[1]}{found[2]}", out=tmp_path / "run", **options), cwd=tmp_path)
    assert (tmp_path / "run" / "model.safetensors").exists()
