"""Runs with ``--batch-norm exact``: weights and statistics of whole batches, storage, interruptions and reasons."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import train_plainly
from safetensors.torch import load_file
from torch import Tensor, nn

import snugfit
from snugfit._api.planning import RunnablePlan
from snugfit._core.explanation import explanation_of
from snugfit._training.events import EpochDone, Event
from snugfit.errors import InterruptedRunError, OutOfStorageError

OPTIONS: dict[str, Any] = {
    "epochs": 2, "max_train": 96, "max_val": 40, "image_size": 16, "batch_size": 32, "seed": 3, "schedule": "constant",
    "threads": 1,
}  # fmt: skip


def smooth() -> nn.Module:
    """A network without kinks, whose training amplifies rounding little; dropout is behind the norms."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 8, 1), (8, 16, 2), (16, 16, 1), (16, 24, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


class Double(nn.Module):
    """A network in float64."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.double()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        return self.network(images.double())


def planned(network: nn.Module, batch_norm: str, micro_batch: int, **options: Any) -> RunnablePlan:
    """A plan with micro-batches of this size, whatever the budget."""
    options = {**OPTIONS, "strategy": "backprop", "batch_norm": batch_norm, "lr": 0.01, **options}
    found = snugfit.plan(network, "digits", **options)
    choice = found.plan.choice
    assert choice is not None and choice.predicted is not None and found.plan.chosen == 0
    settings = {**choice.settings, "micro_batch": micro_batch, "micro_batches": OPTIONS["batch_size"] // micro_batch}
    size = OPTIONS["batch_size"] * int(settings["scratch_bytes"])
    phases = tuple(replace(phase, batch_size=micro_batch, storage_bytes=size) for phase in choice.predicted.phases)
    cost = replace(choice.predicted, storage_bytes=size, phases=phases)
    forced = replace(choice, settings=settings, predicted=cost)
    return replace(found, plan=replace(found.plan, candidates=(forced,)))


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model.safetensors")


def error(mine: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Largest difference of a tensor, relative to its norm."""
    return max(
        float((mine[name].double() - tensor.double()).norm() / tensor.double().norm()) for name, tensor in exact.items()
    )


@pytest.fixture(scope="module")
def exact() -> dict[str, Tensor]:
    """The weights and statistics that whole batches train, in a plain loop in float64."""
    found = train_plainly(Double(smooth()), OPTIONS)
    return {name.removeprefix("network."): tensor for name, tensor in found.items()}


@pytest.mark.parametrize("micro_batch", [2, 16])
def test_a_run_trains_the_weights_and_statistics_of_whole_batches(
    tmp_path: Path, exact: dict[str, Tensor], micro_batch: int
) -> None:
    cache = tmp_path / "cache"
    record = planned(smooth(), "exact", micro_batch, cache_dir=str(cache)).run((), out=tmp_path / "run")
    rounding = error(train_plainly(smooth(), OPTIONS), exact)
    assert error(weights(tmp_path / "run"), exact) < 4 * rounding < 1e-4
    assert 0 < record.measured["storage_bytes"] <= record.predicted["storage_bytes"]
    assert record.settings["micro_batch"] == micro_batch and record.settings["whole_batch"]
    assert not [path for path in cache.rglob("*") if path.is_file()], "nothing stays behind"
    planned(smooth(), "micro", micro_batch).run((), out=tmp_path / "micro")
    assert error(weights(tmp_path / "micro"), exact) > 100 * rounding


@pytest.mark.parametrize("batch_norm", ["exact", "micro"])
def test_micro_batches_take_an_optimizer_from_python(tmp_path: Path, batch_norm: str) -> None:
    own = partial(torch.optim.AdamW, lr=0.01, weight_decay=5e-4, fused=True)
    planned(smooth(), batch_norm, 8, optimizer=own, lr=None).run((), out=tmp_path / "own")
    planned(smooth(), batch_norm, 8, optimizer="adamw").run((), out=tmp_path / "named")
    assert error(weights(tmp_path / "own"), weights(tmp_path / "named")) == 0


def stop(event: Event) -> None:
    if isinstance(event, EpochDone):
        raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    planned(smooth(), "exact", 8).run((), out=tmp_path / "whole")
    with pytest.raises((InterruptedRunError, KeyboardInterrupt)):
        planned(smooth(), "exact", 8).run((stop,), out=tmp_path / "run")
    snugfit.resume(tmp_path / "run", (), model=smooth())
    assert error(weights(tmp_path / "run"), weights(tmp_path / "whole")) == 0


def test_a_run_on_a_full_disk_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = tmp_path / "run"
    plan = planned(smooth(), "exact", 8)
    with monkeypatch.context() as disk, pytest.raises(OutOfStorageError, match="--batch-norm micro") as caught:
        disk.setattr(os, "posix_fallocate", full)
        plan.run((), out=run)
    assert caught.value.exit_code == 6
    snugfit.resume(run, (), model=smooth())
    planned(smooth(), "exact", 8).run((), out=tmp_path / "whole")
    assert error(weights(run), weights(tmp_path / "whole")) == 0


def test_a_storage_budget_that_is_too_small_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutOfStorageError, match=r"storage budget has 0 MB.*--batch-norm micro"):
        planned(smooth(), "exact", 8, storage="100kB").run((), out=tmp_path / "run")


def test_a_network_without_batch_norm_trains_as_before(tmp_path: Path) -> None:
    def plain() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)]
        return nn.Sequential(*layers)

    for name in ("exact", "micro"):
        record = planned(plain(), name, 8).run((), out=tmp_path / name)
        assert not record.settings["whole_batch"] and record.measured["storage_bytes"] == 0
    assert error(weights(tmp_path / "exact"), weights(tmp_path / "micro")) == 0


def test_what_cannot_run_in_tiles_has_one_clear_reason() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.BatchNorm1d(32), nn.Linear(32, 10))
    found = snugfit.plan(network, "digits", strategy="backprop", batch_norm="exact", **OPTIONS).plan.candidates[0]
    assert not found.feasible and len(found.reasons) == 1
    assert found.reasons[0].startswith("--batch-norm exact") and "no leading part" in found.reasons[0]


def test_other_strategies_refuse_it() -> None:
    with pytest.raises(
        snugfit.errors.UsageError, match="--batch-norm exact is an option of backprop, not of checkpoint"
    ):
        snugfit.plan(smooth(), "digits", strategy="checkpoint", batch_norm="exact", **OPTIONS)
    found = snugfit.plan(smooth(), "digits", batch_norm="exact", **OPTIONS).plan.candidates
    reasons = {each.strategy: each.reasons for each in found if each.strategy != "backprop"}
    assert "does not support --batch-norm exact" in reasons["elastic"][0], reasons


def test_a_plan_says_whose_statistics_norms_use() -> None:
    found = planned(smooth(), "exact", 8)
    (said,) = (each for each in explanation_of(found.plan) if "micro-batches" in each)
    assert re.search(r"4 micro-batches that BatchNorm normalises by the statistics of all 32 images", said)


def test_averaged_weights_in_tiles_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    planned(smooth(), "exact", 8, ema=0.9).run((), out=tmp_path / "tiles")
    planned(smooth(), "exact", 32, ema=0.9).run((), out=tmp_path / "whole")
    planned(smooth(), "exact", 8).run((), out=tmp_path / "last")
    assert error(weights(tmp_path / "tiles"), weights(tmp_path / "whole")) < 1e-4
    assert error(weights(tmp_path / "tiles"), weights(tmp_path / "last")) > 1e-2
