"""Peaks of a plan with freed memory that the heap keeps."""

from dataclasses import replace

import pytest

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.machine_memory import MachineMemory
from snugfit._core.plan import Candidate, Correction, Cost, Phase, Plan
from snugfit._core.run_memory import RunMemory
from snugfit._core.workload import Workload
from snugfit._planner.calibration import PastRun, correction
from snugfit._planner.kept_memory import with_kept_memory
from snugfit.memory import freed_memory
from snugfit.memory.freed_memory import GROWTH

MB = 10**6
TRAINS = Phase("network", 100 * MB, 3.0, 16)
TESTS = Phase("exit", 120 * MB, 1.0, 16, steps=False)


def planned(budget=None, phases=(TRAINS,), free=4000 * MB, runs=(), **changes):
    work = Workload("net", "images", (3, 4, 4), 2, 32, 5, 5)
    hardware = Hardware("cpu", "cpu", 1, 10**9, "Linux", "2", True)
    cost = Cost(max(phase.peak_bytes for phase in phases), 3.0, 3.0, phases=phases)
    other = Candidate("checkpoint", True, predicted=cost)
    rest = RunMemory(100 * MB, 0, MachineMemory(free + 100 * MB))
    plan = Plan(work, Budget(budget), hardware, (other, Candidate("backprop", True, predicted=cost)), 1, memory=rest)
    return with_kept_memory(replace(plan, **changes), runs)


def test_without_a_budget_every_phase_may_grow_by_the_most():
    small = replace(TRAINS, name="interval 2", peak_bytes=50 * MB)
    plan = planned(phases=(TRAINS, small))
    first, second = plan.choice.predicted.phases
    assert first.peak_bytes == plan.choice.predicted.peak_bytes == int(100 * MB * GROWTH)
    assert (first.kept_bytes, second.kept_bytes) == (first.peak_bytes - 100 * MB, second.peak_bytes - 50 * MB)
    assert plan.candidates[0].predicted.peak_bytes == 100 * MB, "others are compared by what they need"
    assert plan.choice.predicted.least_peak_bytes == 100 * MB == plan.candidates[0].predicted.least_peak_bytes
    assert f"{(first.peak_bytes - 100 * MB) / MB:.1f} MB of freed memory" in plan.explanation[-1]


@pytest.mark.parametrize("budget", range(100, 200, 7))
def test_a_budget_holds_what_is_kept(budget):
    phase = planned(budget * MB).choice.predicted.phases[0]
    assert phase.peak_bytes == 100 * MB + phase.kept_bytes <= max(budget * 0.97 - 4, 100) * MB
    room = int(budget * MB * (1 - 0.03)) - 2**22 - 100 * MB
    assert phase.kept_bytes == min(max(room, 0), 70 * MB), "0.7 of it, within the budget less 3 % and 4.2 MB"


def test_a_phase_without_steps_keeps_nothing():
    trains, tests = planned(phases=(TRAINS, TESTS)).choice.predicted.phases
    assert trains.kept_bytes == 70 * MB and tests == TESTS


@pytest.mark.parametrize("changes", [{"aim": "memory"}, {"memory": None}, {"chosen": None}])
def test_otherwise_peaks_stay_as_they_are(changes):
    plan = planned(**changes)
    assert all(each.predicted.phases[0] == TRAINS for each in plan.candidates) and plan.explanation == ()


@pytest.mark.parametrize("budget", [None, 10**9])
def test_half_of_the_free_memory_bounds_what_is_kept(budget):
    assert planned(budget, free=340 * MB).choice.predicted.peak_bytes == 169 * MB, "2 MB of it are left out"
    assert planned(budget, free=342 * MB).choice.predicted.peak_bytes == 170 * MB


def test_another_malloc_keeps_nothing(monkeypatch):
    monkeypatch.setattr(freed_memory, "sets_thresholds", lambda: False)
    assert planned().choice.predicted.phases == (TRAINS,)


def test_a_peak_above_its_prediction_corrects_all_plans_of_a_strategy():
    ran = PastRun("backprop", "net", (3, 4, 4), 10.0, 5.0, 100, 150, kept=True)
    found = correction([ran], "backprop", planned().workload)
    assert (found.seconds, found.runs) == (1.0, 0) and found.peak == pytest.approx(1.5 * 1.01)


def test_runs_that_kept_memory_correct_its_seconds_and_others_do_not():
    ran = PastRun("backprop", "net", (3, 4, 4), 10.0, 5.0, 100, 90, kept=True)
    slow = replace(ran, seconds=20.0, kept=False)
    assert planned(runs=[slow]).choice.predicted.seconds == 3.0
    choice = planned(runs=[slow, ran]).choice
    assert choice.predicted.seconds == choice.predicted.phases[0].seconds == 1.5 and choice.correction.seconds == 0.5
    assert correction([slow, ran], "backprop", planned().workload).seconds == 2.0
    twice = Candidate("backprop", True, predicted=Cost(100 * MB, 6.0, 6.0, phases=(TRAINS,)), correction=slowed(2.0))
    again = planned(runs=[slow, ran], candidates=(twice,), chosen=0).choice
    assert (again.predicted.seconds, again.correction.seconds) == (1.5, 0.5), "the other correction is taken back"


def test_slow_runs_of_the_choice_do_not_make_the_others_look_better():
    """The choice was shown with twice the seconds of the others, and called the fastest."""
    ran = PastRun("backprop", "net", (3, 4, 4), 10.0, 30.0, 100, 90, kept=True)
    slower = Candidate("checkpoint", True, predicted=Cost(100 * MB, 20.0, 20.0, phases=(TRAINS,)))
    chosen = Candidate("backprop", True, predicted=Cost(100 * MB, 3.0, 3.0, phases=(TRAINS,)))
    plan = planned(runs=[ran], candidates=(chosen, slower), chosen=0)
    assert plan.choice.predicted.seconds == 9.0 and "9.0s against 20.0s with checkpoint" in " ".join(plan.explanation)
    near = replace(slower, predicted=replace(slower.predicted, seconds=4.0, seconds_per_epoch=4.0))
    plan = planned(runs=[ran], candidates=(chosen, near), chosen=0)
    assert plan.choice.predicted.seconds == 3.0 and "3.0s against 4.0s with checkpoint" in " ".join(plan.explanation)


def slowed(factor):
    return Correction(seconds=factor, runs=1)


def test_a_run_needs_and_is_warned_of_what_it_cannot_do_without():
    plan = planned(budget=200 * MB)
    assert plan.choice.predicted.peak_bytes == 170 * MB
    scarce, full = (replace(plan.memory, machine=MachineMemory(10**9, free * MB)) for free in (210, 190))
    assert replace(plan, memory=scarce).machine_warning == ""
    assert "need 200.0 MB" in replace(plan, memory=full).machine_warning
