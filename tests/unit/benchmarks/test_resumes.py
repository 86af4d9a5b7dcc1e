"""What two runs of the same measurements are compared by, and how a table tells of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import resumes


def intervals(*drifted: bool, tensors: tuple[str, ...] = ("a", "b")) -> list[dict[str, Any]]:
    return [
        {"tensors": list(tensors), "drifted": each, "predicted_seconds": 0.1, "measured_seconds": 0.4}
        for each in drifted
    ]


@pytest.mark.parametrize(
    ("other", "weights", "found"),
    [
        (intervals(False, False), b"same", []),
        (intervals(False, False), b"else", ["the weights differ from those of the uninterrupted run"]),
        (intervals(False, False, tensors=("a",)), b"same", ["other tensors were selected"]),
        (intervals(False, True, tensors=("a",)), b"else", []),  # it measured anew: other measurements
    ],
)
def test_runs_of_equal_measurements_must_be_equal(
    tmp_path: Path, other: list[dict[str, Any]], weights: bytes, found: list[str]
) -> None:
    for name, content in (("whole", b"same"), ("killed", weights)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    ends = [{"intervals": intervals(False, False)}, {"intervals": other}]
    assert resumes.compared(tmp_path / "whole", tmp_path / "killed", ends) == found


def cell(number: int, *runs: list[dict[str, Any]], failures: tuple[str, ...] = ()) -> dict[str, Any]:
    facts = [[resumes.interval_facts(each) for each in run] for run in runs]
    return json.loads(json.dumps({
        "command": f"flowers, seed 0, trial {number}", "busy": 2, "kills": ["epoch 1", "epoch 3"], "intervals": facts,
        "failures": failures,
    }))  # fmt: skip


def test_the_table_tells_equal_runs_from_failed_ones_and_from_those_of_other_measurements() -> None:
    steady, drifted = intervals(False, False), intervals(False, True)
    cells = [
        cell(0, steady, steady),
        cell(1, steady, drifted),
        cell(2, steady, steady, failures=("the weights differ",)),
        cell(3, failures=("exit code 1: ...",)),
    ]
    text = resumes.render(cells)
    assert "| 0 | 2 | epoch 1, epoch 3 | 2, 2 | 4.0 | 0, 0 | equal |" in text
    assert "| 1 | 2 | epoch 1, epoch 3 | 2, 2 | 4.0 | 0, 1 | drift in one only |" in text
    assert "| 0, 0 | failed |" in text and "| 3 | 2 | epoch 1, epoch 3 | - | - | - | failed |" in text
    last = "4 trials, 8 kills; the copy was killed too, before it ended, in 4. "
    last += "1 ended with equal weights, 2 failed, 1 found drift in one of the two runs only."
    assert text.endswith(last)


@pytest.mark.parametrize(("to_worker", "wrong"), [(True, -9), (False, 8)])
def test_a_kill_may_come_when_all_is_done(to_worker: bool, wrong: int) -> None:
    codes = resumes.allowed_codes(to_worker)
    assert 0 in codes and len(codes) == 2 and wrong not in codes


def test_epochs_of_a_run_folder(tmp_path: Path) -> None:
    assert resumes.epochs_done(tmp_path) == 0
    (tmp_path / "metrics.csv").write_text("phase,epoch,step,loss\ninterval 1,0,1,2.3\ninterval 3,2,1,2.2\ninterv")
    assert resumes.epochs_done(tmp_path) == 2
