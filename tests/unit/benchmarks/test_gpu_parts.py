"""The parts of ``benchmarks.gpu``: they stop in time, go on where they stopped, and say what was run."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks import gpu, gpu_settings
from benchmarks.common import Options
from benchmarks.gpu_tables import NOTHING, render
from torch import nn

from snugfit import _data as datasets


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Options whose runs are counted and not made."""
    ran = []

    def train(settings, options, **_):
        ran.append(settings)
        return {"exit_code": 3, "seconds": 1.0, "error": {"type": "InfeasibleBudgetError", "message": "too small"}}

    monkeypatch.setattr(gpu, "train", train)
    monkeypatch.setenv("SNUGFIT_DATA", str(tmp_path))
    monkeypatch.setattr(gpu.tempfile, "gettempdir", lambda: str(tmp_path))
    return Options(device="cpu", results=tmp_path / "gpu.json", work=tmp_path), ran


def test_a_part_goes_on_where_it_stopped(place, capsys):
    options, ran = place
    assert gpu.main(part=2, minutes=0, quick=True, options=options) == 1 and not ran
    assert "cells left; run the command again" in capsys.readouterr().err
    assert gpu.main(part=2, quick=True, options=options) == 0
    assert len(ran) == len({tuple(map(str, each.items())) for each in ran}) == 6
    assert gpu.main(part=2, quick=True, options=options) == 0 and len(ran) == 6


def test_a_run_that_was_stopped_because_time_was_up_is_left(place, monkeypatch):
    options, _ = place
    monkeypatch.setattr(gpu, "train", lambda *_, **__: {"exit_code": None, "seconds": 5.0})
    assert gpu.main(part=5, quick=True, options=options) == 1
    assert gpu.ResultFile("gpu", options).cells == []


def test_with_several_jobs_peers_wait_for_our_own_runs(place, monkeypatch):
    options, ran = place
    peers = []
    monkeypatch.setattr(gpu, "peer", lambda results, settings, way, *_: peers.append(way))
    assert gpu.main(part=3, jobs=2, quick=True, options=options) == 1 and len(ran) == 5 and not peers
    assert gpu.main(part=3, jobs=2, quick=True, options=options) == 0 and len(ran) == 5 and len(peers) == 3


def test_settings_are_tried_on_the_device_and_left_if_time_is_up(place, monkeypatch):
    options, _ = place
    asked, codes = [], iter((None, 0))

    def run(module, options, extra=()):
        asked.append(module)
        return {"exit_code": next(codes), "seconds": 1.0, "output": {"seconds_per_step": 0.5}}

    monkeypatch.setattr(gpu, "run", run)
    assert gpu.main(part=8, quick=True, options=options) == 1
    assert gpu.main(part=8, quick=True, options=options) == 0
    assert asked[0][-2:] == ["--device", "cpu"] and asked[0][asked[0].index("--batch") + 1] == "2"


@pytest.mark.parametrize("changed", gpu_settings.CASES)
def test_a_plain_loop_takes_every_change_of_settings(changed, monkeypatch, capsys):
    seen = []

    def network(num_classes):
        layers = nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes))
        layers.register_forward_hook(lambda *found: seen.append(found[-1].dtype))
        return layers

    for name in ("benchmark", "deterministic", "allow_tf32"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=SimpleNamespace(tiny=network)))
    sizes = ["--model", "tiny", "--batch", "2", "--side", "2", "--device", "cpu"]
    assert gpu_settings.app([*sizes, *changed]) == 0
    assert json.loads(capsys.readouterr().out)["seconds_per_step"] > 0
    assert len(seen) == gpu_settings.WARM_UP + gpu_settings.STEPS
    assert set(seen) == {torch.bfloat16 if "bfloat16" in changed else torch.float32}
    assert torch.backends.cudnn.allow_tf32 == ("--no-tf32" not in changed)


@pytest.mark.parametrize("part", range(len(gpu.PARTS)))
def test_every_part_has_cells_whose_settings_differ(place, part):
    options, _ = place
    few = gpu.PARTS[part] == "tests"  # pytest lists those of each file in a process of its own
    session = gpu.Session(gpu.ResultFile("gpu", options), options, few, 1, 480, 1e9)
    cells = list(gpu._PARTS[part](session))
    names = [name for name, _ in cells]
    assert len(names) == len(set(names)) > 0


def test_precisions_are_compared(place, monkeypatch):
    options, ran = place
    monkeypatch.setattr(gpu, "peer", lambda *_: None)
    assert gpu.main(part=3, quick=True, options=options) == 0
    assert [each["precision"] for each in ran if "precision" in each] == ["float32", "bfloat16", "float16"]


def test_budgets_are_above_the_context(place):
    options, _ = place
    session = gpu.Session(gpu.ResultFile("gpu", options), options, False, 1, 480, 1e9)
    settings = session.settings("torchvision:convnext_tiny:224", 100)
    assert (settings["model"], settings["image_size"], settings["memory"]) == (
        "torchvision:convnext_tiny",
        224,
        "580MB",
    )
    assert session.settings("vgg16")["memory"] is None and session.settings("vgg16")["image_size"] == 32


def test_noise_is_read_as_cifar(place, tmp_path):
    for name, classes in (("cifar10", 10), ("cifar100", 100)):
        splits = datasets.load(name, data_dir=gpu.data_folder(place[0]), max_train=64)
        assert splits.image_shape == (3, 32, 32) and len(splits.class_names) == classes


def test_tables_tell_of_runs_and_of_their_absence():
    assert NOTHING in render([], "matrix")
    record = {
        "measured": {"peak_bytes": 90, "device_memory": None}, "predicted": {"peak_bytes": 100},
        "budget": {"memory_bytes": 80}, "phases": [{"epochs": 1, "batch_size": 4}], "accuracy": {"test": 0.5},
    }  # fmt: skip
    cell = {"arm": "matrix", "settings": {"model": "vgg8"}, "exit_code": 0, "record": record, "training_seconds": 2.0}
    assert "Of 1 runs, 1 went over the budget and 0 over the prediction; 0 predictions" in render([cell], "matrix")
    refused = {**cell, "exit_code": 5, "error": {"type": "BudgetExceededError", "message": "more than the budget"}}
    del refused["record"]
    assert "Of 2 runs, 2 went over the budget" in render([cell, refused], "matrix")
    tests = {"arm": "tests", "command": "pytest a/test_x.py", "counts": {"tests": 5, "failures": 1, "skipped": 1}}
    assert "| test_x.py | 3 | 1 | 1 |" in render([{**tests, "failed": [("test_a", "assert 1")]}], "tests")
