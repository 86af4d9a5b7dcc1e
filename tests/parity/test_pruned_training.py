"""``prunetrain``, end to end: channels really go, the run can be taken up after they went, and its model is read."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import snugfit
from snugfit import surgery
from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._training.events import EpochDone, Event, Notice, StepDone
from snugfit.errors import InterruptedRunError
from snugfit.strategies.elastic.pruning import Pruner
from snugfit.strategies.elastic.trainer import TensorTrainer

OPTIONS = {
    "max_train": 96, "max_val": 40, "image_size": 16, "batch_size": 32, "seed": 3, "strategy": "elastic",
    "scheme": "prunetrain", "interval": 1, "epochs": 3, "lr": 0.05, "lasso": 0.9,
}  # fmt: skip


@pytest.fixture(autouse=True)
def soon_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A threshold that some channels fall below within three epochs."""
    monkeypatch.setattr(surgery, "prune", functools.partial(surgery.prune, threshold=0.12))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 12, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10)]
    return nn.Sequential(*layers)


def run(folder: Path, *subscribers: Any, **options: Any) -> snugfit.Record:
    return snugfit.plan(network(), "digits", **{**OPTIONS, **options}).run(subscribers, out=folder)


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "stock"])
def test_channels_go_and_the_smaller_model_is_kept(tmp_path: Path, lean: bool) -> None:
    notices: list[Event] = []
    record = run(tmp_path / "run", notices.append, lean=lean)
    full = sum(parameter.numel() for parameter in network().parameters())
    assert record.parameters["full"] == full > record.parameters["trained_model"]
    assert any(isinstance(event, Notice) and "removed" in event.message for event in notices)
    macs = [interval.macs for interval in record.intervals]
    assert len(macs) == 3 and macs[0] == record.intervals[0].full_macs > macs[-1]
    loaded = snugfit.load(tmp_path / "run", network)
    assert sum(parameter.numel() for parameter in loaded.parameters()) == record.parameters["trained_model"]
    assert snugfit.evaluate(tmp_path / "run", model=network)["accuracy"] == pytest.approx(record.accuracy["test"])
    assert b"snugfit" not in pickle.dumps(record.model)


def test_a_plan_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "conformance")
    plan = snugfit.plan("tiny_nets:normless", "digits", **OPTIONS)
    first, second = (plan.run((), out=tmp_path / name) for name in ("a", "b"))
    assert first.parameters == second.parameters and first.parameters["trained_model"] < first.parameters["full"]


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", [StepDone, EpochDone], ids=["within an epoch", "between two"])
def test_a_run_resumed_after_channels_went_ends_with_the_same_weights(
    tmp_path: Path, optimizer: str, moment: type[Event]
) -> None:
    lr = {"sgd": 0.05, "adamw": 0.01}[optimizer]

    def stop(event: Event) -> None:
        if isinstance(event, moment) and event.epoch == 1:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InterruptedRunError):
        run(tmp_path / "stopped", stop, optimizer=optimizer, lr=lr)
    resumed = snugfit.resume(tmp_path / "stopped", (), model=network)
    whole = run(tmp_path / "whole", optimizer=optimizer, lr=lr)
    assert whole.parameters == resumed.parameters and whole.parameters["trained_model"] < whole.parameters["full"]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("lean", [True, False])
def test_the_penalty_enters_each_step_once(micro_batches: int, lean: bool) -> None:
    """One SGD step with the penalty, against autograd on the whole loss, in float64."""
    module = network().double()
    chain = Chain.from_module(module, (1, 8, 8))
    workload = Workload(
        "net",
        "made-up",
        (1, 8, 8),
        10,
        8,
        1,
        1,
        optimizer=OptimizerSettings("sgd", lr=0.1, momentum=0.0, weight_decay=0.0),
    )
    images, labels = torch.randn(8, 1, 8, 8, dtype=torch.float64), torch.arange(8)
    trainer = TensorTrainer(chain.to_module(), chain.forward, workload, micro_batches, lean=lean)
    pruner = Pruner(trainer, (1, 8, 8), 0.5)
    pruner.scale = 0.01
    expected = copy.deepcopy(module)
    expected.train()
    expected[1].eval()
    loss = nn.functional.cross_entropy(expected(images), labels)
    for weight, axes in ((expected[0].weight, [0]), (expected[4].weight, [0, 1])):
        for axis in axes:
            loss = loss + 0.01 * weight.transpose(0, axis).flatten(1).norm(dim=1).sum()
    linear = expected[8].weight.view(10, 12, 4)
    loss = loss + 0.01 * linear.transpose(0, 1).flatten(1).norm(dim=1).sum()
    loss.backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.sub_(0.1 * parameter.grad)
    trainer.select(tuple(trainer.parameters))
    for part in range(micro_batches):
        rows = slice(part * 8 // micro_batches, (part + 1) * 8 // micro_batches)
        trainer.step(images[rows], labels[rows], 1 / micro_batches, part == micro_batches - 1)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(trainer.parameters[name].detach(), parameter.detach(), rtol=1e-10, atol=1e-12)


def test_operations_are_counted_where_layers_have_equal_shapes_too() -> None:
    """Shapes of equal layers, and of a second call, are taken from a cache."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), *(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)), nn.Flatten()]
    chain = Chain.from_module(nn.Sequential(*layers, nn.Linear(256, 10)), (1, 8, 8))
    pruner = Pruner(SimpleNamespace(module=chain.to_module(), lean=False), (1, 8, 8), 0.5)
    assert pruner.macs() == pruner.macs() == 64 * 9 * (4 + 3 * 16) + 2560
