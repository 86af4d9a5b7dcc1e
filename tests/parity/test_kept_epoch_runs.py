"""The best epoch's weights equal those of an identical run that ends with this epoch, in every one-phase strategy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import assert_same, interrupt
from safetensors.torch import load_file
from torch import Tensor, nn

import snugfit
from snugfit._core.record import KeptEpoch
from snugfit._storage.kept_weights import KeptWeights
from snugfit._storage.manifest import Manifest
from snugfit._training.events import EpochDone, Event, StepDone
from snugfit.memory import Baseline, make_meter
from snugfit.strategies import full_network
from snugfit.strategies.elastic import runner

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
import tiny_nets

Once = Callable[[str], tuple[dict[str, Tensor], snugfit.Record]]

pytestmark = pytest.mark.usefixtures("measured_once")

OPTIONS: dict[str, Any] = {
    "epochs": 4, "max_train": 64, "max_val": 40, "image_size": 16, "batch_size": 16, "seed": 3, "schedule": "constant",
    "threads": 1,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "backprop": {"strategy": "backprop"},
    "averaged": {"strategy": "backprop", "optimizer": "schedulefree"},
    "moving average": {"strategy": "checkpoint", "ema": 0.9},
    "checkpoint": {"strategy": "checkpoint"},
    "weights in 16 bits": {"strategy": "backprop", "weight_dtype": "bfloat16"},
    "feedback": {"strategy": "feedback", "feedback_rule": "drtp"},
    "elastic": {"strategy": "elastic", "scheme": "bn+bias", "interval": 2},
    "side network": {"strategy": "sidenet", "image_size": 32, "side_width": 1.0, "prune": "off"},
    "pruned": {
        "strategy": "sidenet", "image_size": 32, "side_width": 1.0, "prune": "0.5", "weight_storage": "int8",
        "retrain_epochs": 1,
    },
    "tiles": {"strategy": "tiled", "tiles": "2x2"},
}  # fmt: skip
SLOW = ("backprop", "checkpoint", "feedback", "pruned", "tiles")
"""Kinds that other tests of this file have, or whose epochs the same code validates as those of quick ones."""
FALLING = (0.25, 0.75, 0.5, 0.25)
"""Validation accuracies that stand in for the true ones, so that the second epoch is the best."""


@pytest.fixture(autouse=True)
def _accuracies(monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(forward: Any, data: Any, run: Any, phase: Any) -> float:
        measured(forward, data, run, phase)
        return FALLING[run.position.epoch]

    measured = full_network.validate
    for module in (full_network, runner):
        monkeypatch.setattr(module, "validate", validate)


def train(folder: Path, **options: Any) -> tuple[dict[str, Tensor], snugfit.Record]:
    torch.manual_seed(0)
    record = snugfit.plan(tiny_nets.cnn, "digits", **{**OPTIONS, **options}).run((), out=folder)
    return load_file(folder / "model.safetensors"), record


@pytest.fixture(scope="module")
def best_run(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """An undisturbed run of each kind, made when it is first asked for."""
    return cache(lambda kind: train(tmp_path_factory.mktemp("runs") / "best", **RUNS[kind]))


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """The same run, ended with the best epoch."""
    ends = {"epochs": 2, "keep": "last"}
    return cache(lambda kind: train(tmp_path_factory.mktemp("runs") / "short", **{**RUNS[kind], **ends}))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in RUNS]
)
def test_the_best_epoch_is_a_run_that_ends_with_it(tmp_path: Path, best_run: Once, short_run: Once, kind: str) -> None:
    (best, record), (short, there) = best_run(kind), short_run(kind)
    last, _ = train(tmp_path / "last", **{**RUNS[kind], "keep": "last"})
    folder = Path(record.run_dir)
    assert_same(best, short)
    assert any(not torch.equal(last[name], tensor) for name, tensor in best.items())
    assert record.kept == KeptEpoch(1, 0.75) and there.kept == KeptEpoch(1, 0.75)
    assert record.accuracy == there.accuracy and record.confusion == there.confusion
    assert snugfit.evaluate(folder, model=tiny_nets.cnn)["accuracy"] == record.accuracy["test"]
    assert snugfit.verify(folder).sound and not (folder / "best").exists()


@pytest.mark.parametrize("strategy", ["backprop", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_a_run_without_patience_left_is_finished_with_its_best_epoch(
    tmp_path: Path, short_run: Once, strategy: str
) -> None:
    """Stopped within the third epoch, after which it ends, and not at all."""
    best, record = train(tmp_path / "best", strategy=strategy, patience=1)
    short, _ = short_run(strategy)
    assert_same(best, short)
    assert record.kept == KeptEpoch(1, 0.75) and record.phases[0].epochs == 3
    assert snugfit.verify(tmp_path / "best").sound and not (tmp_path / "best" / "best").exists()
    assert Path(snugfit.draw_report(tmp_path / "best")["report"]).exists()
    torch.manual_seed(0)
    plan = snugfit.plan(tiny_nets.cnn, "digits", **{**OPTIONS, "strategy": strategy, "patience": 1})
    interrupt(plan, tmp_path / "stopped", count=10)
    resumed = snugfit.resume(tmp_path / "stopped", (), model=tiny_nets.cnn)
    assert_same(best, load_file(tmp_path / "stopped" / "model.safetensors"))
    assert resumed.kept == record.kept and resumed.accuracy == record.accuracy


@pytest.mark.parametrize(
    ("kind", "event", "count"),
    [
        pytest.param(kind, *stop, marks=[] if row == column else pytest.mark.slow)
        for row, kind in enumerate(("averaged", "elastic", "side network"))
        for column, stop in enumerate(((StepDone, 6), (StepDone, 10), (EpochDone, 4)))
    ],
)
def test_a_stopped_run_keeps_the_same_epoch(
    tmp_path: Path, best_run: Once, kind: str, event: type[Event], count: int
) -> None:
    """Stopped within the best epoch, after it, and after the last."""
    whole, record = best_run(kind)
    torch.manual_seed(0)
    plan = snugfit.plan(tiny_nets.cnn, "digits", **{**OPTIONS, **RUNS[kind]})
    interrupt(plan, tmp_path / "stopped", event, count)
    resumed = snugfit.resume(tmp_path / "stopped", (), model=tiny_nets.cnn)
    assert_same(whole, load_file(tmp_path / "stopped" / "model.safetensors"))
    assert resumed.kept == record.kept and resumed.accuracy == record.accuracy


def mostly_weights() -> nn.Module:
    """A network whose weights take far more memory than its feature maps."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten()),
        *(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 10)),
    )


def test_keeping_stays_within_the_budget(tmp_path: Path) -> None:
    options = {**OPTIONS, "strategy": "backprop", "memory": "220MB", "max_train": 32}
    record = snugfit.plan(mostly_weights, "digits", **options).run((), out=tmp_path)
    assert record.kept == KeptEpoch(1, 0.75) and record.enforced
    assert record.measured["peak_bytes"] <= record.predicted["peak_bytes"]


def test_keeping_and_restoring_copy_no_weights(tmp_path: Path) -> None:
    """Of 42 MB of weights; no matrix is row-major."""
    network = mostly_weights()
    for layer in network:
        if isinstance(layer, nn.Linear):
            layer.weight.data = layer.weight.data.t().contiguous().t()
    weights, kept = network.state_dict(), KeptWeights(tmp_path, Manifest(tmp_path))
    before = {name: tensor.clone() for name, tensor in weights.items()}
    meter = make_meter(Baseline(0, 0), torch.device("cpu"))
    start = meter.mark()
    kept.save(0, weights)
    for tensor in weights.values():
        tensor.zero_()
    mapped = kept.map(0)
    network.load_state_dict(mapped)
    assert meter.mark() - start < 2e6
    assert_same(before, network.state_dict())


def test_validation_of_the_kept_weights_is_that_of_their_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the true accuracies, statistics of norms included."""
    monkeypatch.undo()
    _, record = train(tmp_path, strategy="backprop", lr=0.05, epochs=6)
    assert record.kept is not None and record.accuracy["val"] == record.kept.val_accuracy
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("val_accuracy")
    found = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
    assert record.kept.epoch == max(range(6), key=lambda epoch: (found[epoch], epoch))
