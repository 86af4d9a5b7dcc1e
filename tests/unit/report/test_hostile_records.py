"""Records that no run has written: refused with the field's name, or drawn, and never a crash or a loop."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_runs
import pytest

from snugfit._core.profile import ProbeLine
from snugfit._storage.manifest import Manifest
from snugfit._storage.run_folder import read_record
from snugfit.errors import CheckpointError

HOSTILE = (None, -1, 2**60, -0.5, 1e300, "x", "", [], {}, True, [[1]], {"a": 1})


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    return json.loads(json.dumps(fake_runs.blockwise(tmp_path).to_json()))


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested data."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*where, key)
        yield from places(item, (*where, key))


def with_value(data: Any, where: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(data)
    inside = changed
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = value
    return changed


def read(folder: Path, data: Any) -> Any:
    (folder / "record.json").write_text(json.dumps(data))
    Manifest.of(folder)
    return read_record(folder)


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (("predicted", "peak_bytes"), "many", "'predicted.peak_bytes' must be a number"),
        (("measured", "seconds"), -1, "'measured.seconds' must be a number from 0"),
        (("measured", "missed_phases"), [1], r"'measured.missed_phases\[0\]' must be text"),
        (("measured", "process_peak_bytes"), [1, -1], r"'measured.process_peak_bytes\[1\]' must be a number from 0"),
        (("measured", "loss_scale"), {"scale": -1.0}, "'measured.loss_scale.scale' must be a number from 0"),
        (("measured", "missed_phases"), 1, "'measured.missed_phases' must be a list"),
        (("accuracy", "val"), 2, "'accuracy.val' must be a number from 0 to 1"),
        (("exits", 0, "index"), 10**15, r"'exits\[0\].index' must be a number from 0 to 100000"),
        (("exits", 0, "val_accuracy"), "0.5", r"'exits\[0\].val_accuracy' must be a number"),
        (("phases", 1, "batch_size"), 2**40, r"'phases\[1\].batch_size' must be a number"),
        (("predicted", "peak_metric"), "RssAnon", "'predicted.peak_metric' must be a number from 0"),
        (("accuracy", "missed_phases"), ["x"], "'accuracy.missed_phases' must be a number"),
        (("exit", "of"), None, "'exit.of' must be an integer"),
        (("kept",), {"epoch": 0, "val_accuracy": 1.5}, "'kept.val_accuracy' must be a number from 0 to 1"),
        (("confusion", 0), [1], "'confusion' must be a square"),
        (("profile", "lines"), [1], "'profile.lines' must be an object"),
        (("class_names",), "abc", "'class_names' must be a list"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, good, where, value, says):
    with pytest.raises(CheckpointError, match=says) as caught:
        read(tmp_path, with_value(good, where, value))
    assert "record.json" in str(caught.value) and "\n" not in str(caught.value)


def test_any_value_anywhere_is_refused_or_taken(tmp_path, good):
    chance = random.Random(1)
    everywhere = list(places(good))
    refused = 0
    for _ in range(300):
        try:
            read(tmp_path, with_value(good, chance.choice(everywhere), chance.choice(HOSTILE)))
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 150


@pytest.mark.parametrize(
    "line",
    [
        ProbeLine("a", 0.0, -1.0, 0.0, 0.0, 0.0), ProbeLine("a", 1e18, 1e-300, 1e18, 0.0, 0.0),
        ProbeLine("a", -1e18, 1.0, 0.0, 0.0, 0.0), ProbeLine("a", 0.0, 0.0, 0.0, 0.0, 0.0),
    ],
)  # fmt: skip
def test_the_largest_batch_is_found_at_once_whatever_the_line(line):
    calls = []

    class Counting(ProbeLine):
        def bytes_at(self, batch: int) -> int:
            calls.append(batch)
            return super().bytes_at(batch)

    counting = Counting(*(getattr(line, name) for name in line.__dataclass_fields__))
    assert 0 <= counting.largest_batch(1e9, 2**40) <= 2**40
    assert len(calls) <= 42
