"""The best selection within time and memory."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import every_mask
from profiles import branched, layers, straight, with_steps

from snugfit._core.profile import Saved
from snugfit.selection import choice
from snugfit.selection.choice import TIME_RESOLUTION, Headroom, choose, needed_bytes
from snugfit.selection.network import Network
from snugfit.selection.pareto import Limits
from snugfit.selection.timing import StepTimes


def times_of(profile, batch=1):
    return StepTimes(Network(with_steps(profile, 500, 400, 100), batch))


def scores(network, seed, negative=False):
    drawn = np.random.default_rng(seed).lognormal(0, 2, len(network.names))
    return np.where(np.random.default_rng(seed + 1).random(len(drawn)) < 0.4, -drawn, drawn) if negative else drawn


@settings(max_examples=100, deadline=None)
@given(layers(least=2))
def test_the_smallest_ratio_is_the_edge(made):
    times = times_of(straight(*made))
    network, edge = times.network, times.smallest_ratio
    assume(0.2 < edge < np.inf)  # above what the classifier takes, so that there is something below
    above = choose(times, network, np.ones(len(network.names)), Headroom(edge * (1 + 1e-9)))
    below = choose(times, network, np.ones(len(network.names)), Headroom(edge * (1 - 1e-9)))
    assert (above & ~network.head).any()
    assert below.tolist() == network.head.tolist() or edge == pytest.approx(0.2, rel=1e-6)


@settings(max_examples=150, deadline=None)
@given(branched(), st.floats(0.1, 1.0), st.integers(0, 99))
def test_it_never_exceeds_the_ratio_takes_the_classifier_and_nothing_that_does_harm(profile, ratio, seed):
    times = times_of(profile)
    network, importance = times.network, scores(times.network, seed, negative=True)
    mask = choose(times, network, importance, Headroom(ratio))
    assert (mask & network.head).tolist() == network.head.tolist()
    assert not (mask & ~network.head & (importance <= 0)).any()
    assert times.ratio(mask) <= max(ratio, times.ratio(network.head)) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(layers(least=2, most=5), st.floats(0.2, 0.9), st.integers(0, 99))
def test_with_time_alone_it_is_the_best_of_all_selections(made, ratio, seed):
    """Up to rounding: each of N times is rounded upward to a thousandth of the budget."""
    times = times_of(straight(*made))
    network, importance = times.network, scores(times.network, seed)
    mask = choose(times, network, importance, Headroom(ratio))
    others = ~network.head
    masks = np.array([m for m in every_mask(len(network.names)) if (m & network.head).sum() == network.head.sum()])
    rounding = 1 - len(network.names) / TIME_RESOLUTION
    budget = times.backward_budget(ratio)

    def fits(one, allowed):
        chosen = np.flatnonzero(one & others)
        way = network.t_dy[chosen[0] + 1 : np.argmax(network.head)].sum() if len(chosen) else 0.0
        return not len(chosen) or network.t_dw[chosen].sum() + way <= allowed

    value = importance[mask & others].sum()
    sure = max(importance[m & others].sum() for m in masks if fits(m, budget * rounding if budget > 0 else budget))
    most = max(importance[m & others].sum() for m in masks if fits(m, budget * (1 + 1e-9)))
    assert sure * (1 - 1e-12) <= value <= most * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(branched(), st.floats(0.2, 1.0), st.floats(0, 1), st.booleans(), st.integers(0, 99))
def test_it_never_exceeds_the_memory(profile, ratio, share, holds, seed):
    times = times_of(profile)
    memory = Network(profile, 2)
    network = times.network
    least = needed_bytes(memory, network.head, Headroom(ratio, None, holds))
    most = needed_bytes(memory, times.everything, Headroom(ratio, None, holds))
    headroom = Headroom(ratio, int(least + share * (most - least)), holds)
    mask = choose(times, memory, scores(network, seed), headroom)
    assert needed_bytes(memory, mask, headroom) <= headroom.bytes
    assert times.ratio(mask) <= max(ratio, times.ratio(network.head)) * (1 + 1e-9)
    assert (mask & network.head).sum() == network.head.sum()


@settings(max_examples=60, deadline=None)
@given(branched(), st.integers(0, 99))
def test_memory_to_spare_changes_nothing(profile, seed):
    times = times_of(profile)
    network, importance = times.network, scores(times.network, seed)
    ample = 10 * needed_bytes(network, times.everything, Headroom(1.0)) + 10**6
    free = choose(times, network, importance, Headroom(0.6))
    assert choose(times, network, importance, Headroom(0.6, ample)).tolist() == free.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_more_room_is_not_worse_by_more_than_how_closely_it_is_searched(seed):
    rng = np.random.default_rng(seed)
    made = [(float(rng.uniform(0, 2)), [(float(rng.uniform(0, 1)), 0.1) for _ in range(2)]) for _ in range(10)]
    times = times_of(straight(*made))
    parts = [
        replace(
            one, output_bytes=1000, map=one.map, saved=(Saved(1000 + i, 30),),
            tensors=tuple(replace(t, bytes=int(rng.integers(4, 300)), saved=(Saved(one.map - 1, 1000),) * (j == 0))
                          for j, t in enumerate(one.tensors)),
        )
        for i, one in enumerate(times.network.operators)
    ]  # fmt: skip
    times = times_of(replace(times.network.profile, operators=tuple(parts)))
    network, importance = times.network, rng.lognormal(0, 2, 20)
    least, most = (needed_bytes(network, mask, Headroom(0.8)) for mask in (network.head, times.everything))
    values = [
        importance[choose(times, network, importance, Headroom(0.8, int(least + (most - least) * share)))].sum()
        for share in np.linspace(0, 1, 12)
    ]
    assert values[0] < values[-1]
    assert all(more >= less * 0.98 for less, more in itertools.pairwise(values)), [round(float(v), 2) for v in values]


def test_without_room_for_anything_the_classifier_is_left():
    times = times_of(straight((1, [(1, 0)]), (1, [(1, 0)])))
    assert choose(times, times.network, np.ones(2), Headroom(1.0, 1)).tolist() == [False, True]
    assert choose(times, times.network, np.ones(2), Headroom(0.01)).tolist() == [False, True]


def test_what_is_needed_counts_state_and_step():
    network = Network(straight((1, [(1, 0)]), (1, [(1, 0)])), 1, state_copies=2)
    assert needed_bytes(network, network.head, Headroom(1.0)) == 2 * 4 + (8 + 8 + 8 + 4), (
        "state, then input, output, its gradient and a weight's"
    )


def tensors_of_many_sizes(seed):
    """Six operators in a row, each with a tensor and a map of a size of its own."""
    rng = np.random.default_rng(seed)
    made = [(float(rng.uniform(0, 2)), [(float(rng.uniform(0.1, 1)), 0.1)]) for _ in range(6)]
    profile = times_of(straight(*made)).network.profile

    def sized(one):
        saved = (Saved(one.map - 1, int(rng.integers(100, 1500))),)
        tensors = tuple(replace(tensor, bytes=int(rng.integers(4, 900)), saved=saved) for tensor in one.tensors)
        return replace(one, output_bytes=int(rng.integers(200, 2000)), tensors=tensors)

    parts = [sized(one) for one in profile.operators]
    return times_of(replace(profile, operators=tuple(parts))), rng.lognormal(0, 2, 6)


@pytest.mark.parametrize("holds", [False, True])
def test_within_memory_it_is_nearly_the_best_of_all_selections(holds):
    """The search looks at few selections, so that it may miss the best one, but rarely and by little."""
    shares = []
    for seed, share in itertools.product(range(12), (0.2, 0.5, 0.8)):
        times, value = tensors_of_many_sizes(seed)
        network = times.network
        least, most = (
            needed_bytes(network, mask, Headroom(0.9, None, holds)) for mask in (network.head, times.everything)
        )
        headroom = Headroom(0.9, int(least + share * (most - least)), holds)
        fitting = [
            value[mask & ~network.head].sum()
            for mask in map(np.array, every_mask(6))
            if mask[network.head].all()
            and needed_bytes(network, mask, headroom) <= headroom.bytes
            and times.ratio(mask) <= 0.9
        ]
        found = value[choose(times, network, value, headroom) & ~network.head].sum()
        shares.append(found / max(fitting) if max(fitting) else 1.0)
    assert np.mean(shares) > 0.97 and np.mean(np.isclose(shares, 1)) > 0.9 and min(shares) > 0


@pytest.mark.parametrize("seed, share", [(0, 0.1), (0, 0.2), (7, 0.2), (11, 0.35)])
def test_a_tensor_that_fits_is_found_where_the_search_over_bytes_finds_none(seed, share):
    times, value = tensors_of_many_sizes(seed)
    network = times.network
    least, most = (needed_bytes(network, mask, Headroom(0.9)) for mask in (network.head, times.everything))
    headroom = Headroom(0.9, int(least + share * (most - least)))
    found = choose(times, network, value, headroom)
    alone = [np.arange(6) == tensor for tensor in np.flatnonzero(~network.head)]
    fitting = [each for each in alone if needed_bytes(network, each | network.head, headroom) <= headroom.bytes]
    assert fitting and value[found & ~network.head].sum() >= max(value[each].sum() for each in fitting)


def test_tensors_are_added_the_most_important_first_unless_they_do_harm():
    def at_most_two(mask):
        return mask.sum() <= 2

    importance = np.array([-1.0, 2.0, 3.0, 0.0, 1.0])
    alone = np.array([False, False, False, False, True])
    assert choice._filled(alone, importance, at_most_two).tolist() == [False, False, True, False, True]
    assert choice._filled(alone, importance, lambda mask: True).tolist() == [False, True, True, False, True]
    assert choice._filled(alone, importance, lambda mask: False) is alone


def test_a_room_of_exactly_what_is_needed_is_not_searched(monkeypatch):
    times, value = tensors_of_many_sizes(0)
    free = choose(times, times.network, value, Headroom(0.9))
    exactly = needed_bytes(times.network, free, Headroom(0.9))
    assert choose(times, times.network, value, Headroom(0.9, exactly - 1)).tolist() != free.tolist()
    monkeypatch.setattr(choice, "solve_within", None)
    assert choose(times, times.network, value, Headroom(0.9, exactly)).tolist() == free.tolist()


@pytest.mark.parametrize("holds", [False, True])
def test_budgets_are_divided_as_finely_as_is_said_and_held_gradients_count(monkeypatch, holds):
    times, value = tensors_of_many_sizes(1)
    network, seen = times.network, []
    select, within, model = choice.select, choice.solve_within, choice.byte_model

    def log(function):
        return lambda *arguments: (seen.append(arguments), function(*arguments))[1]

    for name, function in (("select", select), ("solve_within", within), ("byte_model", model)):
        monkeypatch.setattr(choice, name, log(function))
    least = needed_bytes(network, network.head, Headroom(0.9, None, holds))
    choose(times, network, value, Headroom(0.9, least + 500, holds))
    others = ~network.head
    assert seen[0][3:] == (times.backward_budget(0.9), 4000)
    gradients = network.gradient_bytes[others] if holds else 0
    assert seen[1][0].tolist() == (network.own_bytes[others] + gradients).tolist()
    headroom = least + 500 - network.state_bytes(network.head)
    assert seen[2][4] == Limits(times.backward_budget(0.9), int(headroom), 1000)


class TestHowMuchTensorsAreAllowed:
    """`_most` over selections that take exactly what they are allowed, of which a step needs ``needs`` bytes."""

    def tried(self, monkeypatch, needs, limit, *, taken=lambda allowed: allowed, worth=lambda allowed: 1.0):
        asked, head = [], np.array([False, False, True])
        memory = SimpleNamespace(head=head, state_bytes=lambda mask: 10)

        def within(allowed):
            asked.append(allowed)
            return np.array([True, False, True]) * np.float64(allowed), taken(allowed)

        class Importance:
            def __getitem__(self, found):
                return np.array(worth(found[0]) if found[0] else 0.0)

        monkeypatch.setattr(choice, "needed_bytes", lambda memory, found, headroom: needs(found[0]))
        best = choice._most(within, memory, Importance(), Headroom(1.0, limit))
        return asked, best[0]

    def test_it_falls_by_what_a_step_lacks_and_is_then_halved_until_close(self, monkeypatch):
        asked, best = self.tried(monkeypatch, lambda allowed: 10 + 1.5 * allowed, 110)
        assert asked == [100, 50, 75, 62.5, 68.75, 65.625, 67.1875, 66.40625] and best == 66.40625

    def test_it_falls_by_two_percent_at_least_and_is_halved_once_half_the_tries_are_gone(self, monkeypatch):
        asked, best = self.tried(monkeypatch, lambda allowed: 110.1, 110)
        falling = [100 * 0.98**times for times in range(7)]
        assert asked == pytest.approx([*falling, *(falling[-1] / 2**times for times in range(1, 6))])
        assert not best

    def test_it_starts_from_what_was_taken_and_is_halved_where_nothing_would_be_left(self, monkeypatch):
        asked, _ = self.tried(monkeypatch, lambda allowed: 1000, 110, taken=lambda allowed: min(allowed, 60))
        assert asked == [100, *(60 / 2**times for times in range(1, 12))]

    def test_a_step_that_just_fits_is_taken(self, monkeypatch):
        assert self.tried(monkeypatch, lambda allowed: 110, 110) == ([100], 100)

    def test_the_best_that_fitted_is_kept_and_the_later_of_equals(self, monkeypatch):
        def needs(allowed):
            return 10 + 1.5 * allowed

        for worth, kept in (
            (lambda allowed: -allowed, False),
            (lambda allowed: 100 - allowed, 50),
            (lambda a: 1, 66.40625),
        ):
            assert self.tried(monkeypatch, needs, 110, worth=worth)[1] == kept

    def test_without_room_nothing_is_asked(self, monkeypatch):
        assert self.tried(monkeypatch, lambda allowed: 0, 10) == ([], False)
        assert self.tried(monkeypatch, lambda allowed: 0, None) == ([], False)


def test_held_gradients_are_there_all_the_time():
    network = Network(straight((1, [(1, 0)]), (1, [(1, 0)])), 1, state_copies=2)
    everything = np.ones(2, dtype=bool)
    held = needed_bytes(network, everything, Headroom(1.0, None, True)) - needed_bytes(
        network, everything, Headroom(1.0)
    )
    assert 0 < held <= 8  # both gradients, of which one may be there at the peak in any case
