"""Runs of ``elastic`` end to end under an enforced budget: what intervals record, and what a budget makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MB = 10**6
LESS = 18 * MB
"""By how much the budget lies below what a run takes without one."""

SCRIPT = """
import json, sys
import pytest, torch
from safetensors.torch import load_file
sys.path.insert(0, "..")
from conftest import use_steady_times
import snugfit
snugfit.prepare_process(1)
use_steady_times(pytest.MonkeyPatch())
folder, part, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])
seen = {}

def run(planned, name):
    phases = planned.plan.choice.predicted.phases
    return planned.run((), out=f"{folder}/{name}").to_json() | {"kept": [phase.kept_bytes for phase in phases]}

def plan(model, memory=None, **options):
    return snugfit.plan(model, "digits", snugfit.Budget(memory=memory, time_ratio=options.pop("rho")), image_size=16,
                        max_train=96, max_val=40, batch_size=32, strategy="elastic", threads=1, **options)

heavy = {"rho": 1.0, "epochs": 2, "interval": 1, "importance": "weight", "optimizer": "adamw"}
if part == "bound":
    seen["bound"] = run(plan("tiny_nets:heavy", budget, **heavy), "bound")
else:
    seen["free"] = run(plan("tiny_nets:heavy", **heavy), "free")
    everything = plan("tiny_nets:heavy", **{**heavy, "rho": None}, scheme="full")
    seen["full"] = run(everything, "full")
    ranked = plan("tiny_nets:dropout_cnn", budget, rho=0.8, epochs=5, interval=2)
    for name in ("once", "again"):
        seen[name] = run(ranked, name)
    once, again = (load_file(f"{folder}/{name}/model.safetensors") for name in ("once", "again"))
    seen["same"] = once.keys() == again.keys() and all(torch.equal(once[key], again[key]) for key in once)
json.dump(seen, open(f"{folder}/{part}.json", "w"))
"""


def ran(folder: Path, part: str, budget: int) -> dict[str, Any]:
    """Runs in a process of their own, in which nothing was before them."""
    command = [sys.executable, "-c", SCRIPT, str(folder), part, str(budget)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads((folder / f"{part}.json").read_text()))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs by name."""
    folder = tmp_path_factory.mktemp("runs")
    found = ran(folder, "others", 150 * MB)
    return found | ran(folder, "bound", found["free"]["intervals"][0]["predicted_peak_bytes"] - LESS)


RUNS = {"once": 0.8, "again": 0.8, "free": 1.0, "bound": 1.0, "full": 1.0}


@pytest.mark.parametrize("run", RUNS)
def test_intervals_agree_with_the_record(seen: dict[str, Any], run: str) -> None:
    record, intervals = seen[run], seen[run]["intervals"]
    assert sum(interval["epochs"] for interval in intervals) == record["workload"]["epochs"]
    assert [phase["epochs"] for phase in record["phases"]] == [interval["epochs"] for interval in intervals]
    epoch = 0
    for interval in intervals:
        assert interval["first_epoch"] == epoch
        epoch += interval["epochs"]
        assert set(interval["tensors"]) <= set(record["tensors"]) and len(set(interval["tensors"])) >= 3
        assert interval["tensors"] == [name for name in record["tensors"] if name in interval["tensors"]], "in order"
        assert 0 < interval["predicted_seconds"] <= RUNS[run] * interval["full_seconds"] * (1 + 1e-6)
        assert 0 < interval["macs"] <= interval["full_macs"] and interval["measured_seconds"] > 0
        assert set(interval["importance"]) == (set(record["tensors"]) if run != "full" else set())


@pytest.mark.parametrize("run", RUNS)
def test_no_interval_takes_more_than_it_was_predicted_to(seen: dict[str, Any], run: str) -> None:
    record = seen[run]
    assert any(record["kept"]) or run == "bound"
    for phase, interval, kept in zip(record["phases"], record["intervals"], record["kept"], strict=True):
        assert phase["predicted_peak_bytes"] == interval["predicted_peak_bytes"] + kept
        assert 0 < phase["measured_peak_bytes"] <= phase["predicted_peak_bytes"] <= record["predicted"]["peak_bytes"]


def test_spans_are_those_of_the_interval(seen: dict[str, Any]) -> None:
    assert [interval["epochs"] for interval in seen["once"]["intervals"]] == [2, 2, 1]


def test_a_plan_that_is_run_again_repeats_itself(seen: dict[str, Any]) -> None:
    assert seen["same"]
    selections = [[interval["tensors"] for interval in seen[run]["intervals"]] for run in ("once", "again")]
    assert selections[0] == selections[1]


def test_a_budget_makes_selections_smaller_and_holds(seen: dict[str, Any]) -> None:
    bound, free = seen["bound"], seen["free"]
    budget = bound["budget"]["memory_bytes"]
    assert budget == free["intervals"][0]["predicted_peak_bytes"] - LESS and bound["enforced"]
    assert bound["measured"]["peak_bytes"] <= bound["predicted"]["peak_bytes"] <= budget
    assert free["measured"]["peak_bytes"] > budget, "or it would be no bound"
    for with_budget, without in zip(bound["intervals"], free["intervals"], strict=True):
        assert set(with_budget["tensors"]) < set(without["tensors"]) == set(free["tensors"])


def test_everything_selected_takes_what_full_training_takes(seen: dict[str, Any]) -> None:
    free, full = seen["free"], seen["full"]
    assert free["intervals"][0]["tensors"] == full["intervals"][0]["tensors"] == full["tensors"]
    assert free["intervals"][0]["macs"] == full["intervals"][0]["macs"] == full["intervals"][0]["full_macs"]
