"""Time left: the plan's seconds, scaled by how fast the run has been."""

from __future__ import annotations

import pytest

from snugfit._core.plan import Cost, Phase
from snugfit._report.console import PRIOR, TimeLeft

PHASES = (Phase("a", 1, 100.0, 8), Phase("b", 1, 300.0, 8), Phase("test", 1, 50.0, 8))
COST = Cost(1, 40.0, 450.0, phases=PHASES)


def test_starts_with_the_prediction():
    left = TimeLeft(COST, started=10.0)
    assert left.seconds(10.0) == 450.0
    left.start_phase("a", 0, 3)
    assert left.seconds(10.0) == 450.0


def test_on_time_run_counts_down():
    left = TimeLeft(COST, 0.0)
    left.start_phase("a", 0, 3)
    left.progress(0.5)
    assert left.seconds(50.0) == pytest.approx(400.0)
    left.end_phase()
    assert left.seconds(100.0) == pytest.approx(350.0)
    left.start_phase("b", 1, 3)
    left.progress(1.0)
    assert left.seconds(400.0) == pytest.approx(50.0)


def test_slow_run_scales_what_remains():
    left = TimeLeft(COST, 0.0)
    left.start_phase("a", 0, 3)
    left.end_phase()
    prior = PRIOR * 450
    assert left.seconds(200.0) == pytest.approx((200 + prior) / (100 + prior) * 350)
    assert 600 < left.seconds(200.0) < 700


def test_resumed_run_counts_only_what_it_did_itself():
    left = TimeLeft(COST, 0.0)
    left.start_phase("b", 1, 3)
    left.progress(0.5, first=True)
    assert left.seconds(0.0) == pytest.approx(200.0)
    left.progress(0.75)
    assert left.seconds(75.0) == pytest.approx(125.0)
    left.end_phase()
    assert left.seconds(150.0) == pytest.approx(50.0)


def test_without_phases_all_are_taken_as_equal():
    left = TimeLeft(Cost(1, 10.0, 90.0), 0.0)
    left.start_phase("x", 1, 3)
    left.progress(0.5)
    assert left.seconds(15.0) == pytest.approx(45.0)


def test_nothing_predicted_is_no_division_by_zero():
    assert TimeLeft(Cost(1, 0.0, 0.0), 0.0).seconds(5.0) == 0.0
