"""Peaks and seconds of a plan with freed memory that the heap keeps."""

import math
from dataclasses import replace

import pytest
from search_samples import made_up, searched

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.machine_memory import MachineMemory
from snugfit._core.plan import Candidate, Cost, Phase, Plan
from snugfit._core.profile import ProbePoint, Profile, StepSeconds, TensorProfile
from snugfit._core.run_memory import RunMemory
from snugfit._core.workload import Workload
from snugfit._planner.kept_memory import with_kept_memory, with_kept_seconds
from snugfit.memory import fit_line, freed_memory
from snugfit.memory.address_space import KERNEL_BYTES
from snugfit.memory.freed_memory import GROWTH, LEFT_SHARE, UNKEPT_BYTES, UNKEPT_SHARE

MB = 10**6
TRAINS = Phase("network", 100 * MB, 3.0, 16)
TESTS = Phase("exit", 120 * MB, 1.0, 16, steps=False)


def planned(budget=None, phases=(TRAINS,), free=4000 * MB, **changes):
    work = Workload("net", "images", (3, 4, 4), 2, 32, 5, 5)
    hardware = Hardware("cpu", "cpu", 1, 10**9, "Linux", "2", True)
    cost = Cost(max(phase.peak_bytes for phase in phases), 3.0, 3.0, phases=phases)
    other = Candidate("checkpoint", True, predicted=cost)
    rest = RunMemory(100 * MB, 0, MachineMemory(free + 100 * MB))
    plan = Plan(work, Budget(budget), hardware, (other, Candidate("backprop", True, predicted=cost)), 1, memory=rest)
    return with_kept_memory(replace(plan, **changes))


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


def profile(steps=None, heap="layers"):
    points = (ProbePoint(2, 10 * MB, 1.0, 0.25), ProbePoint(8, 40 * MB, 4.0, 2.0), ProbePoint(16, 80 * MB, 8.0, 4.0))
    line = replace(fit_line("network", points), heap=heap)
    tensors = None if steps is None else TensorProfile(16, (), steps)
    return Profile((), {"network": line}, base_bytes=50 * MB, tensors=tensors)


def kept(measured, budget, free=4000 * MB):
    return with_kept_seconds(measured, Budget(budget), free)


def test_where_there_is_room_steps_save_the_time_for_mapping_memory():
    line, measured = (found.lines["network"] for found in (kept(profile(), None), profile()))
    assert [line.seconds_at(batch) for batch in (2, 8, 16)] == [0.75, 2.0, 4.0]
    for batch in (1, 12, 32):
        mapping = fit_line("m", [ProbePoint(2, 1, 0.25), ProbePoint(8, 1, 2.0), ProbePoint(16, 1, 4.0)]).seconds_at(
            batch
        )
        assert line.seconds_at(batch) == pytest.approx(max(measured.seconds_at(batch) - mapping, 0.0))
    assert line.bytes_at(12) == measured.bytes_at(12)


def budget_with(room):
    """A budget of which ``room`` may be filled with freed memory."""
    return math.ceil(((room + UNKEPT_BYTES) / (1 - UNKEPT_SHARE) + KERNEL_BYTES) / (1 - LEFT_SHARE))


def test_a_full_budget_saves_a_first_part_of_it_and_one_with_some_room_more():
    """A peak of 130 MB at 16 images, for which 26 MB more save all; two fifths are saved by a heap that never grows."""
    tight, some = 131 * MB, budget_with(130 * 1.1 * MB)
    assert kept(profile(), tight).lines["network"].seconds_at(16) == pytest.approx(8.0 - 0.4 * 4.0)
    found = kept(profile(), some).lines["network"]
    assert found.seconds_at(16) == pytest.approx(8.0 - 0.7 * 4.0, abs=0.01) and found.seconds_at(8) == 2.0
    plain = profile().lines["network"]
    assert found.seconds_at(32) == pytest.approx(plain.seconds_at(32) - 0.4 * plain.mapping_at(32)), "210 MB do not fit"
    assert kept(profile(), None, free=0).lines["network"].seconds_at(16) == 8.0, "nothing is kept"


@pytest.mark.parametrize(
    ("heap", "room", "seconds"),
    [
        ("recomputed", 1.0, 8.0 - 0.6 * 4.0), ("recomputed", 1.1, 8.0 - 0.8 * 4.0), ("recomputed", 1.2, 4.0),
        ("steps", 1.6, 8.0), ("steps", 1.8, 4.0), ("nothing", 9.0, 8.0),
    ],
)  # fmt: skip
def test_what_keeps_less_saves_less(heap, room, seconds):
    """Where layers run again, each unit's graph is freed at once. Without layers to check, memory is kept only with
    room for all growth; files stay mapped or are read again.
    """
    found = kept(profile(heap=heap), budget_with(130 * room * MB))
    assert found.lines["network"].seconds_at(16) == pytest.approx(seconds, abs=1e-5)


def test_whole_steps_save_the_same_share():
    steps = StepSeconds(16, 10.0, 8.0, 2.0, mapping_share=0.5)
    once = kept(profile(steps=steps), None)
    assert once.tensors.steps == StepSeconds(16, 5.0, 4.0, 1.0) == kept(once, None).tensors.steps


@pytest.mark.parametrize(("aim", "room"), [("time", 48 * MB), ("memory", 0)])
def test_strategies_propose_by_the_seconds_of_training(aim, room):
    """Half of the free memory less 2 MB is room, unless memory is the aim; the process that trains knows it, too."""
    strategy, rooms = made_up("backprop", [(10 * MB, 3.0, 0)]), []
    propose = type(strategy).propose

    def observed(self, workload, profile, hardware, budget):
        rooms.append(profile.lines["backprop-probe"].room_bytes)
        return propose(self, workload, profile, hardware, budget)

    type(strategy).propose = observed
    found = searched(strategy, aim=aim, free_bytes=100 * MB, budget=Budget(None))
    assert set(rooms) == {room} == {found.profile.lines["backprop-probe"].room_bytes}


def test_a_run_needs_and_is_warned_of_what_it_cannot_do_without():
    plan = planned(budget=200 * MB)
    assert plan.choice.predicted.peak_bytes == 170 * MB
    scarce, full = (replace(plan.memory, machine=MachineMemory(10**9, free * MB)) for free in (210, 190))
    assert replace(plan, memory=scarce).machine_warning == ""
    assert "need 200.0 MB" in replace(plan, memory=full).machine_warning
