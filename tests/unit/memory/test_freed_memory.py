"""Freed memory that the heap keeps: how much, when less, and that nothing stays afterwards."""

import sys
from itertools import pairwise

import pytest

from snugfit.memory import freed_memory
from snugfit.memory.freed_memory import KEEP_ALL_BYTES, LOOP_GROWTH, THRESHOLDS, FreedMemory, kept_peak
from snugfit.memory.heap import MMAP_THRESHOLD_BYTES

MB = 10**6
NOTHING = (MMAP_THRESHOLD_BYTES, None)
ALL = (THRESHOLDS[-1], KEEP_ALL_BYTES)
TO_ALL = 2 * (len(THRESHOLDS) - 1)
"""Steps until everything is kept."""


@pytest.fixture
def calls(monkeypatch):
    """What the allocator was told, in order."""
    told = []
    monkeypatch.setattr(freed_memory, "set_thresholds", lambda mapped, trimmed=None: told.append((mapped, trimmed)))
    monkeypatch.setattr(freed_memory, "hold_free_blocks", lambda: told.append("trim"))
    return told


def after_steps(*peaks, allowed):
    freed = FreedMemory()
    freed.begin(allowed)
    with freed.kept():
        for peak in peaks:
            freed.after_step(peak)
    return freed


def test_thresholds_double_to_more_than_the_largest_feature_maps():
    assert THRESHOLDS[0] == MMAP_THRESHOLD_BYTES and THRESHOLDS[-1] == 32 * 2**20
    assert all(high == 2 * low for low, high in pairwise(THRESHOLDS))


def test_every_other_step_more_is_kept_and_all_is_freed_in_the_end(calls):
    after_steps(*[100 * MB] * 20, allowed=1000 * MB)
    assert calls == [NOTHING, *((threshold, KEEP_ALL_BYTES) for threshold in THRESHOLDS[1:]), NOTHING, "trim"]


@pytest.mark.parametrize("allowed", [0, 99 * MB, 105 * MB])
def test_without_room_nothing_is_kept(allowed, calls):
    freed = after_steps(*[100 * MB] * 9, allowed=allowed)
    assert set(calls) == {NOTHING} and not freed.keeps


def test_nothing_is_kept_any_more_if_the_peak_comes_close_to_what_is_allowed(calls):
    freed = after_steps(*[100 * MB] * TO_ALL, 189 * MB, 191 * MB, *[100 * MB] * 6, allowed=200 * MB)
    levels = [(threshold, KEEP_ALL_BYTES) for threshold in THRESHOLDS[1:]]
    assert calls == [NOTHING, *levels, NOTHING, "trim"] and not freed.keeps


def test_in_a_pass_nothing_more_is_kept_and_less_if_its_peak_comes_close(calls):
    freed = after_steps(*[100 * MB] * 4, allowed=200 * MB)
    calls.clear()
    with freed.kept():
        for peak in (100 * MB, 189 * MB, 191 * MB, 100 * MB):
            freed.check(peak)
    assert calls == [(THRESHOLDS[2], KEEP_ALL_BYTES), NOTHING, "trim"]
    calls.clear()
    freed.check(191 * MB)
    assert calls == [] and not freed.keeps


def test_the_next_epoch_goes_on_with_what_the_last_one_found_and_the_next_phase_begins_anew(calls):
    freed = after_steps(*[100 * MB] * TO_ALL, allowed=1000 * MB)
    assert not freed.keeps
    calls.clear()
    with freed.kept():
        assert freed.keeps
    freed.begin(1000 * MB)
    with freed.kept():
        assert not freed.keeps
    assert calls == [ALL, NOTHING, "trim", NOTHING]


def test_steps_outside_of_its_context_change_nothing(calls):
    freed = after_steps(*[100 * MB] * TO_ALL, allowed=1000 * MB)
    freed.begin(1000 * MB)
    calls.clear()
    for _ in range(TO_ALL):
        freed.after_step(100 * MB)
    assert calls == [] and not freed.keeps


def test_nothing_stays_after_an_error(calls):
    freed = after_steps(*[100 * MB] * TO_ALL, allowed=1000 * MB)
    calls.clear()
    with pytest.raises(RuntimeError), freed.kept():
        raise RuntimeError
    assert calls == [ALL, NOTHING, "trim"] and not freed.keeps


def test_once_given_up_nothing_is_kept_until_the_next_phase(calls):
    freed = FreedMemory()
    freed.begin(1000 * MB)
    with freed.kept():
        for _ in range(2):
            freed.after_step(100 * MB)
        assert freed.keeps
        calls.clear()
        freed.give_up()
        freed.give_up()
        for _ in range(9):
            freed.after_step(100 * MB)
        assert calls == [NOTHING, "trim"] and not freed.keeps
        freed.begin(1000 * MB)
        for _ in range(2):
            freed.after_step(100 * MB)
        assert freed.keeps


@pytest.mark.parametrize(
    ("budget", "free", "peak"),
    [
        (None, 10**10, 170 * MB), (184 * MB, 10**10, 170 * MB), (183 * MB, 10**10, 100 * MB),
        (None, 340 * MB, 170 * MB), (None, 339 * MB, 100 * MB),
    ],
)  # fmt: skip
def test_a_peak_may_grow_if_budget_and_half_of_the_free_memory_have_room_for_all_of_it(budget, free, peak, monkeypatch):
    """Of 184 MB, 5 % and the space of kernels, 4.2 MB, stay free."""
    monkeypatch.setattr(freed_memory, "sets_thresholds", lambda: True)
    assert kept_peak(100 * MB, budget, free) == peak
    assert kept_peak(100 * MB, budget, 380 * MB, LOOP_GROWTH) == (190 * MB if budget is None else 100 * MB)
    monkeypatch.setattr(freed_memory, "sets_thresholds", lambda: False)
    assert kept_peak(100 * MB, budget, free) == 100 * MB


def steps_of_one_mebibyte():
    """Faults of ten steps that allocate 16 tensors of 1 MiB, without and with keeping, and bytes that stay."""
    import resource

    import torch

    from snugfit.memory import prepare_process, read_status
    from snugfit.memory.freed_memory import THRESHOLDS, FreedMemory

    def step():
        return [torch.ones(2**18) for _ in range(16)]

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    prepare_process(1)
    resting, freed = read_status().anon, FreedMemory()
    freed.begin(10**9)
    with freed.kept():
        without = faults()
        for _ in range(2 * (len(THRESHOLDS) - 1)):
            freed.after_step(20 * 10**6)
        step()
        kept = faults()
        during = read_status().anon - resting
    return {"without": without, "kept": kept, "during": during, "after": read_status().anon - resting}


@pytest.mark.skipif(sys.platform != "linux", reason="the thresholds are glibc's")
def test_steps_find_their_memory_mapped(fresh_process):
    found = fresh_process(steps_of_one_mebibyte)["steps_of_one_mebibyte"]
    assert found["without"] > 10 * found["kept"]
    assert found["during"] > 15 * 2**20 > 2**21 > found["after"]
