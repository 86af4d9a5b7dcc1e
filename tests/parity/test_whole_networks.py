"""Networks that cannot be divided are planned, bounded and trained as a whole, as in a loop that anyone would write."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import assert_same, interrupt, train_plainly
from safetensors.torch import load_file, load_model
from torch import nn
from whole_nets import REASONS, OnData, Tied, Unused

import snugfit
from snugfit._core.registry import strategies
from snugfit._training.events import Notice
from snugfit.errors import InfeasibleBudgetError

pytestmark = pytest.mark.usefixtures("measured_once")

OPTIONS: dict[str, Any] = {"epochs": 1, "max_train": 64, "max_val": 20, "image_size": 16, "batch_size": 32, "seed": 3}
SETTINGS: dict[str, Any] = {**OPTIONS, "schedule": "constant", "memory": "60MB"}

QUICK = ["Tied", "DataShaped", "hooked"]
"""Whose memory is tested by default: nothing about it depends on why a network cannot be divided."""
OTHERS = [make.__name__ for make in REASONS if make.__name__ not in QUICK]


def made_by(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("make", REASONS)
def test_a_run_equals_the_plain_loop(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    network, events = made_by(make).double(), list[object]()
    plain = train_plainly(copy.deepcopy(network).train(), OPTIONS, epochs=1)
    planned = snugfit.plan(network, "digits", subscribers=(events.append,), strategy="backprop", **SETTINGS)
    record = planned.run((events.append,), out=tmp_path / "run")
    words = "the network is trained as a whole, since it cannot be divided into units: "
    (notice,) = [each.message for each in events if isinstance(each, Notice) and "as a whole" in each.message]
    assert notice.startswith(words + REASONS[make])
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert_same({name: plain[name] for name in stored}, stored, tolerance=1e-10)
    fresh = made_by(make).double()
    load_model(fresh, str(tmp_path / "run" / "model.safetensors"))  # knows shared weights, and refuses missing ones
    images = torch.rand(4, 1, 16, 16)
    assert torch.equal(record.model(images), fresh.eval()(images))
    assert snugfit.evaluate(tmp_path / "run", model=fresh)["accuracy"] == record.accuracy["test"]


MEMORY = """
import json, sys
sys.path[:0] = sys.path_of_tests
import snugfit
from test_whole_networks import SETTINGS, REASONS, made_by
snugfit.prepare_process(1)
for make in REASONS:
    if make.__name__ not in sys.argv:
        continue
    record = snugfit.plan(made_by(make).double(), "digits", strategy="backprop", **SETTINGS).run((), out=make.__name__)
    print(json.dumps([record.measured["peak_bytes"], record.predicted["peak_bytes"], record.budget["memory_bytes"]]))
"""


@pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_runs_stay_within_prediction_and_budget(tmp_path: Path, names: list[str]) -> None:
    """In a process of their own: what other tests leave in memory would count."""
    code = MEMORY.replace("sys.path_of_tests", repr(sys.path))
    command, apart = [sys.executable, "-c", code, *names], {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=apart, capture_output=True, text=True, check=False)
    peaks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(peaks) == len(names), done.stderr
    assert all(0 < measured <= predicted <= budget == 60_000_000 for measured, predicted, budget in peaks), peaks


def test_every_strategy_that_needs_units_says_so_in_the_plan() -> None:
    for name in set(strategies()) - {"backprop"}:
        planned = snugfit.plan(made_by(Tied), "digits", strategy=name, **SETTINGS, **NEEDED.get(name, {}))
        (candidate,) = planned.plan.candidates
        assert candidate.reasons[0].startswith("needs units, and Tied cannot be divided: tied weights: conv.weight")
        with pytest.raises(InfeasibleBudgetError, match=rf"no strategy can serve Tied: {name}: needs units"):
            planned.run(())
    planned = snugfit.plan(made_by(Tied), "digits", **SETTINGS)
    assert planned.plan.choice is not None
    assert (planned.plan.choice.strategy, planned.plan.choice.exact) == ("backprop", True)
    assert "needs units, and Tied cannot be divided" in " ".join(str(planned).split())


NEEDED: dict[str, dict[str, Any]] = {"elastic": {"time_ratio": 0.5}}


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        *((OnData, "sgd"), (Tied, "schedulefree"), (Unused, "sgd")),
        *(
            pytest.param(make, optimizer, marks=pytest.mark.slow)
            for make, optimizer in ((OnData, "schedulefree"), (Tied, "sgd"), (Unused, "schedulefree"))
        ),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(make: Callable[[], nn.Module], optimizer: str, tmp_path: Path) -> None:
    settings = {**OPTIONS, "strategy": "backprop", "memory": "60MB", "optimizer": optimizer}
    snugfit.plan(made_by(make), "digits", **settings).run((), out=tmp_path / "straight")
    interrupt(snugfit.plan(made_by(make), "digits", **settings), tmp_path / "run", count=1)
    snugfit.resume(tmp_path / "run", subscribers=(), model=made_by(make))
    straight, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "run"))
    assert_same(straight, resumed)


@pytest.mark.parametrize(
    "make", [make if make.__name__ in QUICK else pytest.param(make, marks=pytest.mark.slow) for make in REASONS]
)
def test_an_impossible_budget_names_a_larger_one(make: Callable[[], nn.Module]) -> None:
    name = type(make()).__name__
    with pytest.raises(InfeasibleBudgetError, match=rf"{name} on digits does not fit a budget of 1\.0 MB") as caught:
        snugfit.plan(made_by(make), "digits", strategy="backprop", **{**SETTINGS, "memory": "1MB"}).run(())
    smallest = caught.value.smallest_bytes
    assert 1_000_000 < smallest < 60_000_000


def test_shared_weights_are_stored_once_and_loaded_shared(tmp_path: Path) -> None:
    record = snugfit.plan(made_by(Tied), "digits", strategy="backprop", **SETTINGS).run((), out=tmp_path / "run")
    for path in (tmp_path / "run" / "model.safetensors", *(tmp_path / "run" / "weights").glob("*.safetensors")):
        assert {"conv.weight", "again.weight"} & load_file(path).keys() == {"conv.weight"}
    assert record.parameters["full"] == sum(each.numel() for each in made_by(Tied).parameters())
    loaded = record.model
    assert loaded.again.weight is loaded.conv.weight


def test_planning_changes_neither_weights_nor_anything_else_of_the_module() -> None:
    class Counts(OnData):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    network = made_by(Counts)
    before = copy.deepcopy(network.state_dict())
    snugfit.plan(network, "digits", strategy="backprop", **SETTINGS)
    assert network.calls == 0
    assert_same(before, dict(network.state_dict()))
