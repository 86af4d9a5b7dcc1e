"""``profile --tensors``: a row for every tensor, from the measurements of ``elastic``, within the memory budget."""

import dataclasses

import pytest
import torch

import snugfit
from snugfit._core.option_groups import BudgetOptions, DataOptions, MachineOptions, ModelOptions, TrainingOptions
from snugfit._core.profile import OperatorStats, Saved, StepSeconds, TensorProfile, TensorStats
from snugfit._core.request import Request
from snugfit._models import build
from snugfit._training.events import Notice
from snugfit.errors import InfeasibleBudgetError
from snugfit.profiling import TensorProbe
from snugfit.strategies.elastic import probes as tensor_timing
from snugfit.strategies.elastic.probes import tensor_rows

CONV = TensorStats("conv.weight", 36, 144, 0.4, 0.1, 576, (Saved(0, 64), Saved(7, 32)))
HEAD = (TensorStats("fc.weight", 20, 80, 0.2, 0.1, 20, (Saved(2, 8),)), TensorStats("fc.bias", 2, 8, 0.1, 0.1))
PROFILE = TensorProfile(
    batch=4,
    operators=(
        OperatorStats("conv", "Conv2d", (-1,), 1, 256, 1.0, 3.0, tensors=(CONV,)),
        OperatorStats("relu", "ReLU", (0,), 2, 256, 0.5, 0.25),
        OperatorStats("fc", "Linear", (1,), 3, 8, 2.0, 0.5, tensors=HEAD),
    ),
    steps=StepSeconds(4, 9.0, 8.0, 3.0),
)


def test_rows_are_those_of_the_time_model():
    data = tensor_rows(PROFILE)
    conv, weight, bias = data["tensors"]
    assert conv == {
        "name": "conv.weight", "operator": "conv", "kind": "Conv2d", "t_dw": 0.5, "t_dy": 3.0, "update_seconds": 0.1,
        "parameters": 36, "macs": 576, "saved_bytes": 96,
    }  # fmt: skip
    assert (weight["t_dw"], weight["t_dy"]) == pytest.approx((0.3, 0.75)), "the layer without tensors counts to it"
    assert (bias["name"], bias["kind"], bias["t_dy"], bias["saved_bytes"]) == ("fc.bias", "Linear", 0.0, 0)
    steps = {"batch": 4, "stock": 9.0, "full": 8.0, "head": 3.0, "mapping_share": 0.0}
    assert data["tensor_timing"] == {"batch": 4, "forward_seconds": 3.5, "steps": steps}


def test_steps_that_memory_refuses_are_null():
    assert tensor_rows(dataclasses.replace(PROFILE, steps=None))["tensor_timing"]["steps"] is None


def request(memory=None):
    return Request(
        ModelOptions("smallconv", image_size=8),
        DataOptions("digits", max_train=32, max_val=8),
        BudgetOptions(memory),
        TrainingOptions(batch_size=4),
        machine=MachineOptions(threads=1),
    )


def test_a_profile_has_every_tensor_when_asked():
    notices = []
    data = snugfit.profile_request(
        request(), [lambda event: isinstance(event, Notice) and notices.append(event.message)], tensors=True
    )
    assert set(data) == {"model", "input_shape", "units", "tensors", "tensor_timing"}
    with torch.device("meta"):
        parameters = {name: p.numel() for name, p in build("smallconv", 10, 8, 1).named_parameters()}
    assert {row["name"]: row["parameters"] for row in data["tensors"]} == parameters
    assert all(row["t_dw"] > 0 and row["t_dy"] >= 0 for row in data["tensors"])
    timed = data["tensor_timing"]
    assert timed["batch"] == 4 and timed["forward_seconds"] > 0 and timed["steps"]["batch"] == 4
    assert [each for each in notices if "timing" in each] == [f"timing {len(parameters)} tensors one by one"]


def test_a_budget_that_holds_no_operator_is_an_error_that_names_one(monkeypatch):
    seen = []

    def refuse(probe, limit):
        seen.append((limit.budget_bytes, limit.enforced))

    monkeypatch.setattr(TensorProbe, "measure", refuse)
    with pytest.raises(InfeasibleBudgetError, match="operators cannot be timed") as raised:
        snugfit.profile_request(request("90MB"), tensors=True)
    assert seen[0][0] == 90_000_000
    error = raised.value
    assert error.smallest_bytes >= 91_000_000 and error.lacking_bytes == error.smallest_bytes - 90_000_000


def test_lean_operators_are_as_asked(monkeypatch):
    made = []

    class Spy(tensor_timing.ElasticProbes):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self.lean)

    monkeypatch.setattr(tensor_timing, "ElasticProbes", Spy)
    monkeypatch.setattr(TensorProbe, "measure", lambda probe, limit: PROFILE)
    asked = request()
    for lean in (True, False):
        snugfit.profile_request(
            dataclasses.replace(asked, strategy=dataclasses.replace(asked.strategy, lean=lean)), tensors=True
        )
    assert made == [True, False]
