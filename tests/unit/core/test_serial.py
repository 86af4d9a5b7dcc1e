"""Frozen dataclasses through JSON and back."""

import dataclasses
import json
import re

import pytest
from core_samples import COST, HARDWARE, LINE, PLAN, PROFILE, RECORD, WORKLOAD
from hypothesis import given
from hypothesis import strategies as st

from snugfit._core.plan import Cost, Phase, Plan
from snugfit._core.profile import ProbeLine, ProbePoint, Profile
from snugfit._core.record import Record
from snugfit._core.request import Request
from snugfit._core.serial import from_data, to_data
from snugfit._version import SCHEMA


@pytest.mark.parametrize(
    "value", [WORKLOAD, HARDWARE, LINE, PROFILE, COST, PLAN, RECORD], ids=lambda v: type(v).__name__
)
def test_survives_json(value):
    again = from_data(type(value), json.loads(json.dumps(to_data(value))))
    assert again == value
    for item in dataclasses.fields(value):
        assert type(getattr(again, item.name)) is type(getattr(value, item.name)), item.name


def test_nested_types_come_back():
    profile = from_data(Profile, json.loads(json.dumps(to_data(PROFILE))))
    assert isinstance(profile.lines["unit:a"], ProbeLine) and isinstance(profile.lines["unit:a"].points[1], ProbePoint)
    assert profile.units[0].output_shape == (4, 8, 8)


def test_plan_and_record_have_their_own_json():
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    data = json.loads(json.dumps(RECORD.to_json()))
    assert next(iter(data)) == "schema" and data["schema"] == SCHEMA
    assert Record.from_json(data) == RECORD


def test_unknown_keys_are_ignored_and_missing_ones_take_their_defaults():
    data = RECORD.to_json() | {"from_the_future": [1, 2]}
    del data["confusion"]
    assert Record.from_json(data) == dataclasses.replace(RECORD, confusion=[])


def test_a_request_with_every_option_set_survives():
    request = Request()
    groups = {}
    for group in dataclasses.fields(request):
        options = getattr(request, group.name)
        kinds = {"Count": 7, "Workers": 7, "Pixels": 7, "Share": 0.7, "Size": "7MB", "bool": False}
        plain = {
            f.name: re.sub(r"Annotated\[(.*), Common\(.*", r"\1", str(f.type)) for f in dataclasses.fields(options)
        }
        bare = {name: kind.removesuffix(" | None") for name, kind in plain.items()}
        numbers = {name: kinds[kind] for name, kind in bare.items() if kind in kinds}
        texts = {name: "text" for name, kind in bare.items() if kind == "str"}
        groups[group.name] = dataclasses.replace(options, **numbers, **texts)
    filled = Request(**groups)
    assert filled.data.max_train == 7 and filled.machine.out == "text"
    assert Request.from_json(json.loads(json.dumps(filled.to_json()))) == filled
    assert Request.from_json(json.loads(json.dumps(Request().to_json()))) == Request()
    assert Request.from_json({}) == Request()


phases = st.builds(
    Phase, st.text(max_size=5), st.integers(0, 10**12), st.floats(0, 1e9), st.integers(1, 512),
    st.lists(st.text(max_size=3), max_size=3).map(tuple), st.integers(0, 10**12),
)  # fmt: skip
costs = st.builds(
    Cost, st.integers(0, 10**12), st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 10**12), st.integers(0, 9),
    st.lists(phases, max_size=3).map(tuple),
)  # fmt: skip


@given(costs)
def test_any_cost_survives(cost):
    assert from_data(Cost, json.loads(json.dumps(to_data(cost)))) == cost
