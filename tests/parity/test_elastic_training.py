"""Runs of ``elastic`` that must end with the same weights: as backprop, as stock torch, as uninterrupted ones."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import assert_same, train_plainly
from safetensors.torch import load_file
from torch import Tensor, nn

import snugfit
from snugfit._training.events import EpochDone, Event, PhaseDone, StepDone, TensorsSelected
from snugfit.errors import InterruptedRunError
from snugfit.strategies.elastic import drift, runner

OPTIONS = {"max_train": 96, "max_val": 40, "image_size": 16, "batch_size": 32, "seed": 3, "strategy": "elastic"}
pytestmark = pytest.mark.usefixtures("steady_times", "measured_once")


def slow(*rows: tuple[Any, ...]) -> list[Any]:
    """Rows whose parts quick rows have, too."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def normless() -> nn.Module:
    """Convolutions with biases, a pool, and a classifier."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10))


def with_norms(dropout: float = 0.0) -> nn.Module:
    """The same with BatchNorm, whose statistics are not those of the images."""
    first, relu, pool, second, relu_too, *rest = normless()  # type: ignore[misc]
    norms = nn.BatchNorm2d(8), nn.BatchNorm2d(12)
    for norm in norms:
        nn.init.uniform_(norm.running_mean, -0.3, 0.3)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    middle = nn.Dropout(dropout)
    return nn.Sequential(first, norms[0], relu, pool, middle, second, norms[1], relu_too, *rest)


def with_dropout() -> nn.Module:
    """A network whose training draws random numbers in every step."""
    return with_norms(0.2)


def train(folder: Path, network: Callable[[], nn.Module], **options: Any) -> tuple[dict[str, Tensor], snugfit.Record]:
    plan = snugfit.plan(network(), "digits", **{**OPTIONS, "epochs": 2, **options})
    return load_file(folder / "model.safetensors") if (record := plan.run((), out=folder)) else {}, record


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[dict[str, Tensor], snugfit.Record]]:
    """Runs that several tests compare with; each is made when it is first asked for."""
    return cache(lambda network, **options: train(tmp_path_factory.mktemp("made") / "run", network, **options))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", {"scheme": "full"}),
        ("adamw", {"time_ratio": 1.0, "importance": "weight"}),
        ("sgd", {"scheme": "full", "lean": False}),
        *slow(
            ("adamw", {"scheme": "full"}),
            ("sgd", {"time_ratio": 1.0, "importance": "weight"}),
            ("adamw", {"scheme": "full", "lean": False}),
        ),
    ],
)
def test_training_everything_is_backprop(
    tmp_path: Path, made: Callable[..., Any], optimizer: str, options: dict[str, Any]
) -> None:
    plain, _ = made(normless, strategy="backprop", optimizer=optimizer)
    ours, record = train(tmp_path / "b", normless, optimizer=optimizer, **options)
    assert record.strategy == "elastic" and record.intervals[0].tensors == record.tensors
    assert_same(plain, ours)


def test_norms_train_as_in_a_loop_that_keeps_them_in_evaluation_mode(tmp_path: Path) -> None:
    plain = train_plainly(with_norms().eval(), OPTIONS)
    ours, _ = train(tmp_path, with_norms, scheme="full", schedule="constant", keep="last")
    assert_same(plain, ours, tolerance=1e-5)
    assert not torch.equal(ours["1.weight"], with_norms().state_dict()["1.weight"]), "its affine parameters train"


@pytest.mark.parametrize("scheme", ["full", "head", "bn+bias"])
def test_lean_operators_train_as_torchs_own(tmp_path: Path, scheme: str) -> None:
    stock, _ = train(tmp_path / "a", with_norms, scheme=scheme, lean=False)
    lean, record = train(tmp_path / "b", with_norms, scheme=scheme)
    assert_same(stock, lean, tolerance=1e-6)
    fresh = with_norms().state_dict()
    moved = {name for name, tensor in lean.items() if not torch.equal(fresh[name], tensor)}
    assert moved == set(record.intervals[0].tensors), "and nothing else"


THREE = {"epochs": 3, "interval": 1, "time_ratio": 0.8}


class CrashError(Exception):
    """Ends a run where it stands, as a kill would."""


def at(kind: type[Event], count: int, *, crash: bool = False) -> Callable[[Event], None]:
    """A subscriber that interrupts the process, or ends the run, at an event."""
    seen = 0

    def stop(event: Event) -> None:
        nonlocal seen
        seen += isinstance(event, kind)
        if isinstance(event, kind) and seen == count:
            if crash:
                raise CrashError
            os.kill(os.getpid(), signal.SIGINT)

    return stop


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Tensor], snugfit.Record]]:
    """Filled by the first test of each optimizer."""
    return {}


def whole(uninterrupted: dict[str, Any], folder: Path, optimizer: str) -> tuple[dict[str, Tensor], snugfit.Record]:
    if optimizer not in uninterrupted:
        uninterrupted[optimizer] = train(folder / "whole", with_dropout, optimizer=optimizer, **THREE)
    weights, record = uninterrupted[optimizer]
    assert [interval.epochs for interval in record.intervals] == [1, 1, 1]
    return weights, record


def assert_same_selections(one: snugfit.Record, other: snugfit.Record) -> None:
    assert len(one.intervals) == len(other.intervals) > 0 and all(interval.importance for interval in one.intervals)
    for first, second in zip(one.intervals, other.intervals, strict=True):
        assert first.tensors == second.tensors and first.importance == second.importance
        assert (first.first_epoch, first.epochs) == (second.first_epoch, second.epochs)
    assert [(p.name, p.epochs, p.steps) for p in one.phases] == [(p.name, p.epochs, p.steps) for p in other.phases]


@pytest.mark.parametrize(
    ("optimizer", "kind", "count", "crash"),
    [
        ("sgd", StepDone, 1, False),  # right after the first selection
        ("adamw", StepDone, 5, False),  # in the middle of an epoch
        ("adamw", EpochDone, 1, False),  # at an interval's boundary
        ("sgd", TensorsSelected, 1, True),  # before anything is saved
        ("adamw", PhaseDone, 3, True),
        *slow(
            ("sgd", StepDone, 5, False),
            ("sgd", TensorsSelected, 2, False),
            ("adamw", EpochDone, 3, False),  # after the last epoch, before the evaluation
            ("adamw", TensorsSelected, 2, True),
            ("sgd", StepDone, 4, True),
            ("sgd", PhaseDone, 2, True),
        ),
    ],
)
def test_a_resumed_run_is_uninterrupted(
    tmp_path: Path, uninterrupted: dict[str, Any], optimizer: str, kind: type[Event], count: int, crash: bool
) -> None:
    weights, record = whole(uninterrupted, tmp_path, optimizer)
    plan = snugfit.plan(with_dropout(), "digits", **{**OPTIONS, **THREE, "optimizer": optimizer})
    with pytest.raises(CrashError if crash else InterruptedRunError):
        plan.run((at(kind, count, crash=crash),), out=tmp_path / "stopped")
    resumed = snugfit.resume(tmp_path / "stopped", (), model=with_dropout())
    assert_same(weights, load_file(tmp_path / "stopped" / "model.safetensors"))
    assert_same_selections(record, resumed)


def test_selections_in_the_run_folder_are_never_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: dict[str, Any]
) -> None:
    weights, record = whole(uninterrupted, tmp_path, "sgd")
    plan = snugfit.plan(with_dropout(), "digits", **{**OPTIONS, **THREE})
    with pytest.raises(InterruptedRunError):
        plan.run((at(TensorsSelected, 2),), out=tmp_path / "stopped")
    ranked = []

    def rank(strategy: Any, chain: Any, trainer: Any, data: Any, run: Any) -> dict[str, float]:
        ranked.append(run.position.epoch)
        return dict(record.intervals[2].importance)

    monkeypatch.setattr(runner, "rank_tensors", rank)
    resumed = snugfit.resume(tmp_path / "stopped", (), model=with_dropout())
    assert ranked == [2], "only the third selection was left to make"
    assert_same_selections(record, resumed)
    assert_same(weights, load_file(tmp_path / "stopped" / "model.safetensors"))


def test_an_interval_that_drift_cut_short_stays_short_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped right at the end of the epoch whose steps had drifted."""
    options = {"epochs": 3, "interval": 3, "time_ratio": 0.8}
    monkeypatch.setattr(runner, "looks_drifted", lambda interval: interval.first_epoch == 0 and interval.epochs == 1)
    monkeypatch.setattr(runner, "drifted", lambda *_: True)
    weights, record = train(tmp_path / "whole", with_dropout, **options)
    assert [(interval.epochs, interval.profiled) for interval in record.intervals] == [(1, False), (2, True)]
    plan = snugfit.plan(with_dropout(), "digits", **{**OPTIONS, **options})
    with pytest.raises(InterruptedRunError):
        plan.run((at(EpochDone, 1),), out=tmp_path / "stopped")
    resumed = snugfit.resume(tmp_path / "stopped", (), model=with_dropout())
    assert_same_selections(record, resumed)
    assert_same(weights, load_file(tmp_path / "stopped" / "model.safetensors"))


@pytest.mark.parametrize("seed", [0, *slow((1,), (2,), (3,))])
def test_a_run_taken_up_on_a_busy_machine_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[..., Any], seed: int
) -> None:
    """Stopped at a random step; every step afterwards takes two to ten times as long."""
    options, draw = {"epochs": 3, "interval": 1, "time_ratio": 0.8, "schedule": "constant"}, random.Random(seed)
    weights, record = made(with_dropout, **options)
    plan = snugfit.plan(with_dropout(), "digits", **{**OPTIONS, **options})
    with pytest.raises(InterruptedRunError):
        plan.run((at(StepDone, draw.randint(1, 7)),), out=tmp_path / "stopped")
    judged: list[float] = []

    def timed(step: Any, device: Any) -> tuple[None, float]:
        step()
        judged.append(draw.uniform(2.0, 2.2) * (predicted if step.args[2:] == () else 1.0))
        return None, judged[-1]

    predicted = 1.0
    ratio = drift.ratio_without_updates

    def noted(*arguments: Any) -> float:
        nonlocal predicted
        predicted = ratio(*arguments)
        return predicted

    monkeypatch.setattr(drift, "ratio_without_updates", noted)
    monkeypatch.setattr(drift, "timed", timed)
    monkeypatch.setattr(runner, "looks_drifted", lambda interval: True)
    resumed = snugfit.resume(tmp_path / "stopped", (), model=with_dropout())
    assert judged, "it was judged"
    assert not any(interval.drifted or interval.profiled for interval in resumed.intervals)
    assert_same_selections(record, resumed)
    assert_same(weights, load_file(tmp_path / "stopped" / "model.safetensors"))


def test_operators_measured_anew_are_not_measured_again_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between the measurement and the selection that follows from it."""
    options = {"epochs": 2, "interval": 1, "time_ratio": 0.8}
    monkeypatch.setattr(runner, "looks_drifted", lambda interval: interval.first_epoch == 0)
    monkeypatch.setattr(runner, "drifted", lambda *_: True)
    measure, measured = drift.profile_again, list[int]()

    def counted(*arguments: Any) -> Any:
        measured.append(1)
        return measure(*arguments)

    monkeypatch.setattr(runner, "profile_again", counted)
    plan = snugfit.plan(with_dropout(), "digits", **{**OPTIONS, **options})
    rank = runner.rank_tensors

    def killed(*arguments: Any) -> Any:
        if measured:
            raise KeyboardInterrupt
        return rank(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner, "rank_tensors", killed)
        plan.run((), out=tmp_path / "stopped")
    resumed = snugfit.resume(tmp_path / "stopped", (), model=with_dropout())
    assert len(measured) == 1
    assert [interval.profiled for interval in resumed.intervals] == [False, True]


def test_operators_measured_anew_are_kept_for_the_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They steer selections: the third is made from them, by a process that does not measure."""
    options = {"epochs": 3, "interval": 1, "time_ratio": 0.8}
    monkeypatch.setattr(runner, "looks_drifted", lambda interval: interval.first_epoch == 0 and interval.epochs == 1)
    monkeypatch.setattr(runner, "drifted", lambda *_: True)
    plan = snugfit.plan(with_dropout(), "digits", **{**OPTIONS, **options})
    slower = drift.profile_again

    def tripled(*arguments: Any) -> Any:
        return slow(slower(*arguments))

    monkeypatch.setattr(runner, "profile_again", tripled)
    with pytest.raises(InterruptedRunError):
        plan.run((at(StepDone, 4),), out=tmp_path / "stopped")
    resumed = snugfit.resume(tmp_path / "stopped", (), model=with_dropout())
    first, *later = resumed.intervals
    assert [interval.profiled for interval in resumed.intervals] == [False, True, False]
    assert all(interval.full_seconds == pytest.approx(3 * first.full_seconds) for interval in later)


def slow(profile: Any) -> Any:
    """A tensor profile whose operators all take three times as long."""
    from dataclasses import replace

    def slower(tensor: Any) -> Any:
        return replace(tensor, seconds=3 * tensor.seconds, update_seconds=3 * tensor.update_seconds)

    operators = tuple(
        replace(
            each,
            forward_seconds=3 * each.forward_seconds,
            pass_seconds=3 * each.pass_seconds,
            tensors=tuple(map(slower, each.tensors)),
        )
        for each in profile.operators
    )
    return replace(profile, operators=operators)
