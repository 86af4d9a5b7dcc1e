"""Verdicts on cells of the benchmark of budgets, and the draw."""

import os
import subprocess
import sys

from benchmarks import budget_truth
from benchmarks.budget_truth import drawn, verdict
from benchmarks.store import summary

MB = 10**6


def trained(measured=50, predicted=60, budget=70, observed=50, phases=((50, 60),)):
    record = {
        "predicted": {"peak_bytes": predicted * MB}, "measured": {"peak_bytes": measured * MB},
        "budget": {"memory_bytes": budget * MB},
        "phases": [
            {"name": str(i), "measured_peak_bytes": m * MB, "predicted_peak_bytes": p * MB}
            for i, (m, p) in enumerate(phases)
        ],
    }  # fmt: skip
    return {"exit_code": 0, "record": record, "observed_bytes": observed * MB}


def test_promises_kept_have_no_remark():
    assert verdict("drawn", trained()) == verdict("named", trained()) == []
    assert verdict("drawn", {"exit_code": 3}) == verdict("less", {"exit_code": 3}) == []


def test_what_is_broken_is_told():
    assert (
        verdict("named", {"exit_code": 3}) and verdict("less", {"exit_code": 0}) and verdict("drawn", {"exit_code": 5})
    )
    assert verdict("drawn", trained(measured=61)) == ["measured 61.0 MB above prediction 60.0"]
    assert verdict("drawn", trained(observed=61)) == ["observed 60.5 MB above prediction 60.0"]
    assert len(verdict("drawn", trained(observed=71))) == 2
    assert verdict("drawn", trained() | {"planning_bytes": 69 * MB}) == []
    assert verdict("drawn", trained() | {"planning_bytes": 71 * MB}) == ["planning 70.5 MB above budget 70.0"]
    assert verdict("drawn", trained(phases=((50, 60), (41, 40)))) == ["phase 1: measured 41.0 MB above prediction 40.0"]


def test_cells_are_the_same_in_every_run_and_differ():
    cells = [drawn(16, index) for index in range(20)]
    assert cells == [drawn(16, index) for index in range(20)]
    assert len({str(cell) for cell in cells}) == 20
    assert any("small_networks" in cell["model"] for cell in cells)


def test_a_process_is_seen_from_outside():
    script = "data = bytearray(50_000_000); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True)
    assert child.stdout.readline() == "ready\n"
    seen = budget_truth._anon(child.pid)
    child.communicate("\n")
    assert 50 * MB < seen < 90 * MB and budget_truth._anon(child.pid) is None


def test_memory_of_planning_is_told_apart_from_that_of_training(monkeypatch, tmp_path):
    samples = iter([90 * MB, 50 * MB, 60 * MB])
    plan = tmp_path / "plan.json"

    def sampled(pid):
        found = next(samples, None)
        if found == 90 * MB:
            plan.touch()
        elif found is None:
            observer.ended.set()
        return found

    monkeypatch.setattr(budget_truth, "_below", lambda parent: [1])
    monkeypatch.setattr(budget_truth, "_anon", sampled)
    observer = budget_truth._Observer(os.getpid(), plan)
    observer.run()
    assert observer.highest(10 * MB, planned=False) == 80 * MB and observer.highest(10 * MB, planned=True) == 50 * MB


def test_a_plan_that_fits_where_it_should_not_is_told_in_a_line():
    """Three MB less than what was named is planned, not trained, and such an answer has no accuracy."""
    cell = {"exit_code": 0, "seconds": 2.0, "record": {"budget": {"memory_bytes": 105 * MB}, "candidates": []}}
    assert summary(cell) == "2.0 s, - of - MB predicted" and verdict("less", cell)


def test_elastic_that_finds_no_update_in_the_budget_named_does_not_lack_memory():
    error = {
        "type": "InfeasibleTimeError",
        "message": "no update of a tensor outside the classifier lowers the loss.",
    }
    assert verdict("named", {"exit_code": 3, "error": error}) == []
    assert verdict("named", {"exit_code": 3, "error": {**error, "type": "InfeasibleBudgetError"}})
