"""Runs that an earlier version began are resumed, although their files lack what came later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from parity_helpers import assert_same, interrupt, network
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import snugfit
from snugfit._storage.files import write_json_atomic
from snugfit._storage.manifest import Manifest
from snugfit.errors import CheckpointError

OPTIONS: dict[str, Any] = {
    "strategy": "backprop", "epochs": 1, "batch_size": 20, "threads": 1, "image_size": 8, "max_train": 80,
    "max_val": 20,
}  # fmt: skip


def stopped(folder: Path, **options: Any) -> None:
    """A run that was stopped after two steps."""
    interrupt(snugfit.plan(network(1), "digits", **OPTIONS, **options), folder)


def changed(folder: Path, **fields: Any) -> None:
    """Change fields of the workload in a run's plan; None removes one."""
    plan = json.loads((folder / "plan.json").read_text())
    plan["workload"] = {name: each for name, each in {**plan["workload"], **fields}.items() if each is not None}
    write_json_atomic(folder / "plan.json", plan, Manifest.reopen(folder))


def test_a_run_with_weights_is_resumed_though_its_plan_does_not_tell_of_them(tmp_path: Path) -> None:
    weights = str(tmp_path / "w.safetensors")
    save_file(network(0).state_dict(), weights)
    snugfit.plan(network(1), "digits", **OPTIONS, weights=weights).run((), out=tmp_path / "whole")
    stopped(tmp_path / "run", weights=weights)
    changed(tmp_path / "run", pretrained=None)
    record = snugfit.resume(tmp_path / "run", (), model=network(1))
    assert_same(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run")))
    assert record.workload["batch_size"] == 20


def test_another_workload_is_still_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    changed(tmp_path / "run", train_count=79)
    with pytest.raises(CheckpointError, match="model or data have changed since the run"):
        snugfit.resume(tmp_path / "run", (), model=network(1))


def photo_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))


def test_other_names_of_classes_are_refused(tmp_path: Path) -> None:
    """A renamed folder would give every image another label."""
    photos = tmp_path / "photos"
    for label in ("daisy", "rose"):
        (photos / label).mkdir(parents=True)
        for index in range(12):
            Image.new("RGB", (8, 8), (index, 90, 9)).save(photos / label / f"{index}.png")
    options = {**OPTIONS, "batch_size": 4, "max_train": None, "max_val": None}
    interrupt(snugfit.plan(photo_network(), f"folder:{photos}", **options), tmp_path / "run")
    (photos / "daisy").rename(photos / "zinnia")
    with pytest.raises(CheckpointError, match=r"classes of the data have changed .*'daisy' is in one of them alone"):
        snugfit.resume(tmp_path / "run", (), model=photo_network())
    (photos / "zinnia").rename(photos / "daisy")
    assert snugfit.resume(tmp_path / "run", (), model=photo_network()).class_names == ("daisy", "rose")
