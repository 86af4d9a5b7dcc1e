"""Counts of the fuzzers: what is added up, and what is kept."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fuzz.hunt import Failure, Trial
from benchmarks.fuzz.tally import Tally, render


def test_trials_and_failures_are_counted_by_reader(tmp_path: Path) -> None:
    counts = Tally(tmp_path)
    for seed in range(3):
        counts.add(Trial("hosts", seed), None)
    counts.add(Trial("config", 7), Failure(Trial("config", 7), "Traceback\nValueError: no"))
    cells = counts.cells(["hosts", "config"])
    assert cells == [
        {"reader": "hosts", "trials": 3, "failures": 0},
        {"reader": "config", "trials": 1, "failures": 1},
    ]
    assert "ValueError: no" in (tmp_path / "config" / "7.txt").read_text()
    assert render([*cells, *cells]).splitlines()[2:] == ["| hosts | 6 | 0 |", "| config | 2 | 2 |", "| all | 8 | 2 |"]
