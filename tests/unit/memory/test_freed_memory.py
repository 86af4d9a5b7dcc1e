"""Freed memory that the heap keeps: as far as there is room before every layer, and nothing stays afterwards."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules import module

from snugfit.memory import Baseline, MemoryLimit, freed_memory
from snugfit.memory.address_space import allow_batch_norm_backward
from snugfit.memory.freed_memory import (
    KEEP_ALL_BYTES,
    KEPT_BLOCK_BYTES,
    MARGIN,
    MARGIN_BYTES,
    OBSERVED_STEPS,
    UNSEEN_MARGIN,
    FreedMemory,
    is_ample,
    kept_peak,
)
from snugfit.memory.heap import MMAP_THRESHOLD_BYTES
from snugfit.memory.process import PAGE_BYTES

MB = 10**6
NOTHING, ALL = (MMAP_THRESHOLD_BYTES, None), (KEPT_BLOCK_BYTES, KEEP_ALL_BYTES)
FIRST, SECOND = nn.Identity(), nn.Identity()


class Told:
    """A process whose private memory is ``now`` bytes above its baseline, of which a trim frees ``free``."""

    def __init__(self, monkeypatch):
        self.now = self.free = self.faults = 0
        self.touches = 10**9
        self.calls = []
        self.peak_bytes = self.current_bytes = 0
        for name, done in {
            "hold_free_blocks": self.hold,
            "free_held_blocks": self.use,
            "trim_free_pages": self.trim,
        }.items():
            monkeypatch.setattr(freed_memory, name, done)
        monkeypatch.setattr(freed_memory, "set_thresholds", lambda *told: self.calls.append((*told, None)[:2]))
        monkeypatch.setattr(freed_memory, "map_large_blocks", lambda some: self.calls.append(("map", some)))
        monkeypatch.setattr(freed_memory, "_faults", self.touch)
        monkeypatch.setattr("snugfit.memory.limit.late_bytes", lambda: 0)  # what other tests have imported
        monkeypatch.setattr(freed_memory, "sets_thresholds", lambda: True)
        monkeypatch.setattr(freed_memory, "quick_readings", self.readings)

    @contextmanager
    def readings(self):
        yield lambda: (self.now, 0)

    def touch(self):
        """Pages that were touched by now: ``touches`` more at every layer."""
        self.faults += self.touches
        return self.faults

    def hold(self):
        self.calls.append("hold")
        self.now, self.free = self.now - self.free, 0

    def use(self):
        self.calls.append("use")

    def trim(self):
        self.calls.append("trim")
        self.now, self.free = self.now - self.free, 0

    def mark(self):
        """As a meter: the peak since the last restart."""
        self.peak_bytes = max(self.peak_bytes, self.now)
        self.current_bytes = self.now
        return self.peak_bytes


@pytest.fixture
def told(monkeypatch):
    return Told(monkeypatch)


def begun(told, allowed=1000 * MB, kept=0):
    freed = FreedMemory(told, MemoryLimit(None, Baseline(0, 0), torch.device("cpu")))
    freed.begin(allowed, kept)
    return freed


def step(freed, told, grows, kept=0):
    """A step of two layers, each of which grows the process by bytes of which some are free afterwards."""
    for layer in (FIRST, SECOND):
        layer(torch.ones(1))
        told.now += grows
        told.free += kept
    freed.after_step()
    if not freed.keeps:
        told.now = told.free = 0


def test_the_first_steps_keep_nothing_and_the_next_ones_all_that_has_room(told):
    freed = begun(told)
    with freed.kept(steps=True):
        for _ in range(OBSERVED_STEPS):
            assert not freed.keeps and told.calls == []
            step(freed, told, MB)
        assert freed.keeps and told.calls == ["use", ALL]
    assert told.calls == ["use", ALL, NOTHING, "hold"] and not freed.keeps
    told.calls.clear()
    with freed.kept(steps=True):
        assert freed.keeps, "the next epoch goes on with what was seen"
    assert told.calls == ["use", ALL, NOTHING, "hold"]
    freed.begin(1000 * MB)
    with freed.kept(steps=True):
        assert not freed.keeps, "the next phase begins anew"


@pytest.mark.parametrize("supported", [True, False])
def test_nothing_is_kept_without_room_or_another_malloc(supported, told, monkeypatch):
    monkeypatch.setattr(freed_memory, "sets_thresholds", lambda: supported)
    freed = begun(told, allowed=0 if supported else 1000 * MB)
    with freed.kept(steps=True):
        for _ in range(5):
            step(freed, told, MB)
    assert told.calls == [] and not freed.keeps


def keeping(told, needs):
    """A phase in 100 MB that keeps freed memory, each of whose layers was seen to take this."""
    freed = begun(told, 100 * MB)
    with freed.kept(steps=True):
        for _ in range(OBSERVED_STEPS):
            step(freed, told, needs)
        told.calls.clear()
        yield freed


def test_what_is_free_goes_back_before_a_layer_that_lacks_room(told):
    for _ in keeping(told, 10 * MB):
        first = UNSEEN_MARGIN * 10 * MB + MARGIN_BYTES
        told.now, told.free = 100 * MB - int(first), 30 * MB
        FIRST(torch.ones(1))
        assert told.calls == [], "it has just room"
        told.now += 10 * MB
        SECOND(torch.ones(1))
        assert told.calls == ["trim"] and told.now == 39 * MB


def test_what_a_layer_takes_is_learned_where_no_hole_serves_it(told):
    """It may take four times of what was seen, until it ran directly after all was given back."""
    for freed in keeping(told, 10 * MB):
        for _ in range(2):
            step(freed, told, 0)
        assert freed._need(id(FIRST)) == UNSEEN_MARGIN * 10 * MB + MARGIN_BYTES, "holes served it"
        told.now, told.free = 90 * MB, 60 * MB
        FIRST(torch.ones(1))
        assert told.calls == ["trim"]
        told.now += 12 * MB
        SECOND(torch.ones(1))
        assert freed._need(id(FIRST)) == MARGIN * 12 * MB + MARGIN_BYTES
        told.now = 0
        FIRST(torch.ones(1))
        told.now += 20 * MB
        SECOND(torch.ones(1))
        assert freed._need(id(FIRST)) == MARGIN * 20 * MB + MARGIN_BYTES, "more than it took then"
        assert freed._need(id(SECOND)) == UNSEEN_MARGIN * 10 * MB + MARGIN_BYTES


def test_a_layer_takes_no_more_than_it_has_touched_while_nothing_was_kept(told):
    for touches, need in ((20 * MB, 20 * MB), (9 * MB, 10 * MB), (50 * MB, UNSEEN_MARGIN * 10 * MB)):
        told.touches = -(-touches // PAGE_BYTES)
        told.now = 0
        for freed in keeping(told, 10 * MB):
            for layer in (id(FIRST), "not seen"):
                assert need <= freed._need(layer) - MARGIN_BYTES < need + PAGE_BYTES


def test_what_a_layer_has_taken_since_counts_where_it_is_more_than_it_touched(told):
    told.touches = -(-11 * MB // PAGE_BYTES)
    for freed in keeping(told, 10 * MB):
        assert freed._need(id(FIRST)) - MARGIN_BYTES < 11 * MB + PAGE_BYTES, "no quarter is added to 10 MB"
        FIRST(torch.ones(1))
        told.now += 15 * MB
        SECOND(torch.ones(1))
        assert freed._need(id(FIRST)) == 15 * MB + MARGIN_BYTES


def test_a_layer_without_room_although_all_is_given_back_keeps_nothing_of_what_it_frees(told):
    for freed in keeping(told, 10 * MB):
        told.now, told.free = 80 * MB, 5 * MB
        FIRST(torch.ones(1))
        assert told.calls == ["trim", NOTHING, "hold"]
        told.free = 1 * MB
        SECOND(torch.ones(1))
        assert told.calls[3:] == [NOTHING, "hold"] and told.free == 0, "what was freed meanwhile goes back, too"
        told.now = 10 * MB
        FIRST(torch.ones(1))
        assert told.calls[5:] == ["use", ALL]
        assert freed.keeps


def test_a_layer_that_was_not_seen_takes_the_most_of_all(told):
    others = nn.Identity(), nn.Identity()
    for _ in keeping(told, 10 * MB):
        told.now = 100 * MB - int(UNSEEN_MARGIN * 10 * MB) - MARGIN_BYTES
        others[0](torch.ones(1))
        assert told.calls == []
        told.now += 1
        others[1](torch.ones(1))
        assert "trim" in told.calls


def test_layers_are_checked_backward_too_and_containers_are_not(told):
    layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    freed, seen = begun(told), []
    freed._before = seen.append
    with freed.kept(steps=True):
        layers(torch.ones(1, 1)).sum().backward()
    first, second = map(id, layers)
    assert seen == [first, second, (second, "backward"), (first, "backward")]
    with torch.no_grad():
        layers(torch.ones(1, 1))
    assert len(seen) == 4, "the hooks are gone"


def test_passes_keep_only_what_steps_have_shown(told):
    freed = begun(told)
    with freed.kept():
        FIRST(torch.ones(1))
        assert not freed.keeps
    with freed.kept(steps=True):
        for _ in range(OBSERVED_STEPS):
            step(freed, told, MB)
    with freed.kept():
        assert freed.keeps


KEPT_AMPLY = ["use", ALL, ("map", False)]


def test_more_steps_are_observed_where_the_first_ones_may_be_skipped(told):
    freed = begun(told)
    freed.begin(1000 * MB, observed=3)
    with freed.kept(steps=True):
        for _ in range(3):
            assert not freed.keeps
            step(freed, told, MB)
        assert freed.keeps


def test_with_ample_room_memory_stays_from_the_second_step_to_the_end_of_the_phase(told):
    freed = begun(told, kept=400 * MB)
    assert told.calls == []
    with freed.kept(steps=True):
        step(freed, told, MB)
        assert freed.keeps and told.calls == KEPT_AMPLY
        told.calls.clear()
        freed.give_back()
        freed.pause()
    assert told.calls == [] and freed.keeps, "neither a checkpoint nor the end of an epoch gives anything back"
    with freed.kept():
        assert told.calls == KEPT_AMPLY
    freed.close()
    assert told.calls == [*KEPT_AMPLY, NOTHING, "hold"] and not freed.keeps
    told.calls.clear()
    freed.close()
    assert told.calls == []
    with freed.kept():
        assert told.calls == ["use", ALL], "passes after the phase keep memory as long as they last"
    assert told.calls == ["use", ALL, NOTHING, "hold"]


@pytest.mark.parametrize(
    ("allowed", "kept", "growth", "checks"), [(170, 70, 1.7, False), (169, 69, 1.7, True), (170, 70, 1.9, True)]
)
def test_with_room_for_all_growth_layers_are_not_checked_after_the_first_step(told, allowed, kept, growth, checks):
    freed, hooks = begun(told), (module._global_forward_pre_hooks, module._global_forward_hooks)
    freed.begin(allowed * MB, kept * MB, growth=growth)
    with freed.kept(steps=True):
        assert all(hooks)
        step(freed, told, MB)
        assert [len(each) for each in hooks] == [checks, checks]
        told.calls.clear()
        told.now, told.free = (allowed - 8) * MB, 100 * MB
        step(freed, told, 4 * MB)
        assert ("trim" in told.calls) == checks
        told.now, told.free = allowed * MB, 100 * MB
        step(freed, told, MB)
        assert "trim" in told.calls and told.now < 80 * MB, "what is free goes back after a step without room"
    with freed.kept(steps=True):
        assert [len(each) for each in hooks] == [checks, checks]
    with freed.kept():
        assert all(hooks), "passes go through other shapes"
    assert not any(hooks)


@pytest.mark.parametrize(("now", "stays"), [(90, True), (91, False)])
def test_memory_goes_back_between_passes_if_a_tenth_of_the_allowed_peak_is_not_free(told, now, stays):
    freed = begun(told, 100 * MB, 40 * MB)
    with freed.kept(steps=True):
        step(freed, told, MB)
        told.now, told.free = now * MB, 50 * MB
        told.calls.clear()
    assert told.calls == ([] if stays else [NOTHING, "hold"])
    assert freed.keeps == stays
    with freed.kept(steps=True):
        assert freed.keeps


def test_outside_of_passes_memory_goes_back_even_with_ample_room(told):
    """Nothing reads there what the process has grown by."""
    freed = begun(told, kept=400 * MB)
    with freed.kept(steps=True):
        step(freed, told, MB)
    told.calls.clear()
    freed.pause()
    assert told.calls == [NOTHING, "hold"] and not freed.keeps
    with freed.kept(steps=True):
        told.calls.clear()
        freed.pause(always=True)
        assert told.calls == [NOTHING, "hold"]


@pytest.mark.parametrize("end", [FreedMemory.give_up, FreedMemory.close, lambda freed: freed.begin(1000 * MB)])
def test_whatever_ends_ample_room_gives_all_back(told, end):
    freed = begun(told, kept=400 * MB)
    with freed.kept(steps=True):
        step(freed, told, MB)
    told.calls.clear()
    end(freed)
    assert told.calls == [NOTHING, "hold"] and not freed.keeps


@pytest.mark.parametrize(("peak", "kept", "ample"), [(140, 40, True), (139, 39, False), (100, 0, False)])
def test_room_is_ample_for_a_growth_of_two_fifths(peak, kept, ample):
    assert is_ample(peak, kept) == ample


def test_observing_leaves_the_peak_of_the_meter(told):
    freed = begun(told)
    told.peak_bytes = 50 * MB
    with freed.kept(steps=True):
        step(freed, told, 10 * MB)
    assert told.peak_bytes == 50 * MB
    told.now = 0
    freed.begin(1000 * MB)
    with freed.kept(steps=True):
        step(freed, told, 30 * MB)
    assert told.peak_bytes == 60 * MB


def test_a_pause_gives_all_back_and_lasts_until_the_next_layer_with_room(told):
    for freed in keeping(told, MB):
        freed.pause()
        assert told.calls == [NOTHING, "hold"]
        FIRST(torch.ones(1))
        assert told.calls[2:] == ["use", ALL]


def test_once_given_up_nothing_is_kept_until_the_next_phase(told):
    for freed in keeping(told, MB):
        freed.give_up()
        freed.give_up()
        step(freed, told, MB)
        assert told.calls == [NOTHING, "hold"] and not freed.keeps
    assert told.calls == [NOTHING, "hold"]


def test_a_layer_that_takes_most_of_a_step_needs_room_for_all_growth(told):
    """As where a strategy calls no layers: a check before it says nothing of what happens in it."""
    for allowed, keeps in ((16 * MB, False), (17 * MB, True)):
        freed = begun(told, allowed)
        with freed.kept(steps=True):
            for _ in range(OBSERVED_STEPS):
                FIRST(torch.ones(1))
                told.now = 10 * MB
                freed.after_step()
                told.now = 0
            assert freed.keeps == keeps


def test_layers_in_other_threads_change_nothing(told):
    for _ in keeping(told, 10 * MB):
        told.now = 100 * MB
        other = threading.Thread(target=FIRST, args=(torch.ones(1),))
        other.start()
        other.join()
        assert told.calls == []
        FIRST(torch.ones(1))
        assert told.calls != []


def test_the_allowance_of_batch_norm_stays_where_memory_is_given_back(told):
    """Its backward pass is granted address space after memory was given back, which sets the limit anew."""
    extra = []

    class Limit(MemoryLimit):
        left_bytes = 10**9

        def has_address_space(self, size):
            return False

        def refresh(self, extra_bytes=0):
            extra.append(extra_bytes)
            return 0

    limit, norm = Limit(None, Baseline(0, 0), torch.device("cpu")), nn.BatchNorm2d(2)
    hook = allow_batch_norm_backward(limit)
    freed = FreedMemory(told, limit)
    freed.begin(10 * MB)
    try:
        with freed.kept(steps=True):
            for _ in range(OBSERVED_STEPS):
                step(freed, told, MB)
            loss = norm(torch.ones(2, 2, 4, 4, requires_grad=True)).sum()
            told.now = 100 * MB
            loss.backward()
    finally:
        hook.remove()
    granted = 2 * 2 * 4 * 4 * 4
    assert extra == [0, 0, granted, 0, 0], "given back and paused, granted, taken back, and given back in the end"


def test_nothing_stays_after_an_error(told):
    for _ in keeping(told, MB):
        pass
    freed = begun(told)
    with pytest.raises(RuntimeError), freed.kept(steps=True):
        step(freed, told, MB)
        step(freed, told, MB)
        told.calls.clear()
        raise RuntimeError
    assert told.calls == [NOTHING, "hold"] and not freed.keeps


def test_all_is_given_back_on_demand_and_steps_outside_of_the_context_count_nothing(told):
    for freed in keeping(told, MB):
        told.free = 1 * MB
        freed.give_back()
        assert told.calls == ["trim"] and freed.keeps
    freed.begin(1000 * MB)
    told.calls.clear()
    for _ in range(9):
        freed.after_step()
    with freed.kept(steps=True):
        assert not freed.keeps
    assert told.calls == []


@pytest.mark.parametrize(
    ("budget", "free", "peak"),
    [
        (None, 10**10, 170 * MB), (10**9, 10**10, 170 * MB), (150 * MB, 10**10, 141_305_696),
        (104 * MB, 10**10, 100 * MB),
        (None, 340 * MB, 170 * MB), (None, 320 * MB, 160 * MB), (None, 100 * MB, 100 * MB),
        (150 * MB, 240 * MB, 120 * MB),
    ],
)  # fmt: skip
def test_a_peak_may_grow_as_far_as_budget_and_half_of_the_free_memory_have_room(budget, free, peak, monkeypatch):
    """Of 150 MB, 3 % and the space of kernels, 4.2 MB, stay free."""
    monkeypatch.setattr(freed_memory, "sets_thresholds", lambda: True)
    assert kept_peak(100 * MB, budget, free) == peak
    monkeypatch.setattr(freed_memory, "sets_thresholds", lambda: False)
    assert kept_peak(100 * MB, budget, free) == 100 * MB
