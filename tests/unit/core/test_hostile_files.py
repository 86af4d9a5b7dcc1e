"""Files of run folders and of the cache with wrong values anywhere: the field is named, or what is read is right."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from core_samples import PLAN, PROFILE, RECORD

from snugfit._cli import plan_cache
from snugfit._core.documents import read_data
from snugfit._core.request import Request
from snugfit._core.serial import to_data
from snugfit.errors import CheckpointError
from snugfit.profiling.measurement_cache import Measurement, Measurements

WRONG: tuple[Any, ...] = (None, -1, 1e300, "x", [], {}, True)


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested data, once for lists of equals."""
    inside = value.items() if isinstance(value, dict) else list(enumerate(value))[:2] if isinstance(value, list) else ()
    for key, item in inside:
        yield (*where, key)
        yield from places(item, (*where, key))


def changed(data: Any, where: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(data)
    inside = made
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = value
    return made


@pytest.mark.parametrize("value", [PLAN, PROFILE, RECORD, Request()], ids=lambda value: type(value).__name__)
def test_a_wrong_value_anywhere_is_refused_in_one_line_or_taken_as_it_is(tmp_path, value):
    data, path = json.loads(json.dumps(to_data(value))), tmp_path / "file.json"
    refused = 0
    for where in places(data):
        for wrong in WRONG:
            path.write_text(json.dumps(changed(data, where, wrong)))
            try:
                found = json.loads(json.dumps(to_data(read_data(type(value), path))))
            except CheckpointError as error:
                refused += 1
                assert str(path) in str(error) and "\n" not in str(error)
            else:
                for key in where:
                    found = found.get(key) if isinstance(found, dict) else found[key]
                assert wrong in (found, {}), where  # an object without its fields takes their defaults
    assert refused > 50


def test_a_plan_that_chose_none_of_its_candidates(tmp_path):
    data = PLAN.to_json()
    for chosen in (-1, len(PLAN.candidates)):
        (tmp_path / "plan.json").write_text(json.dumps(data | {"chosen": chosen}))
        with pytest.raises(CheckpointError, match=f"'chosen' is {chosen}"):
            read_data(type(PLAN), tmp_path / "plan.json")


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b"3", b"{", b'{"line": 3}', b'{"floors": {"1": "x"}}', b"[" * 9999]
)
def test_kept_measurements_that_cannot_be_used_are_as_good_as_none(tmp_path, content):
    kept = Measurements(tmp_path)
    kept.keep("a", Measurement(floors={"1": 2}), 100.0)
    (file,) = tmp_path.iterdir()
    assert Measurements(tmp_path).find("a", 100.0) is not None
    file.write_bytes(content)
    assert Measurements(tmp_path).find("a", 100.0) is None


@pytest.mark.parametrize(
    "found", [[], {}, {"plan": 3, "infeasible": None}, {"plan": {}, "infeasible": None}, "[" * 9999]
)
def test_kept_answers_that_cannot_be_used_are_as_good_as_none(tmp_path, monkeypatch, found):
    path = tmp_path / "answer.json"
    monkeypatch.setattr(plan_cache, "_path", lambda *asked: path)
    good = {"plan": json.loads(json.dumps(PLAN.to_json())), "infeasible": None, "comparison": []}
    path.write_text(json.dumps(good))
    assert plan_cache.PlanCache(Request()).find() == good
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    assert plan_cache.PlanCache(Request()).find() is None
