"""The best selection within time and memory."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import every_mask
from profiles import branched, layers, straight, with_steps

from snugfit.core.tensors import Saved
from snugfit.selection.choice import TIME_RESOLUTION, Room, choose, needed_bytes
from snugfit.selection.network import Network
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
    above = choose(times, network, np.ones(len(network.names)), Room(edge * (1 + 1e-9)))
    below = choose(times, network, np.ones(len(network.names)), Room(edge * (1 - 1e-9)))
    assert (above & ~network.head).any()
    assert below.tolist() == network.head.tolist() or edge == pytest.approx(0.2, rel=1e-6)


@settings(max_examples=150, deadline=None)
@given(branched(), st.floats(0.1, 1.0), st.integers(0, 99))
def test_it_never_exceeds_the_ratio_takes_the_classifier_and_nothing_that_does_harm(profile, ratio, seed):
    times = times_of(profile)
    network, importance = times.network, scores(times.network, seed, negative=True)
    mask = choose(times, network, importance, Room(ratio))
    assert (mask & network.head).tolist() == network.head.tolist()
    assert not (mask & ~network.head & (importance <= 0)).any()
    assert times.ratio(mask) <= max(ratio, times.ratio(network.head)) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(layers(least=2, most=5), st.floats(0.2, 0.9), st.integers(0, 99))
def test_with_time_alone_it_is_the_best_of_all_selections(made, ratio, seed):
    """Up to rounding: each of N times is rounded upward to a thousandth of the budget."""
    times = times_of(straight(*made))
    network, importance = times.network, scores(times.network, seed)
    mask = choose(times, network, importance, Room(ratio))
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
    least = needed_bytes(memory, network.head, Room(ratio, None, holds))
    most = needed_bytes(memory, times.everything, Room(ratio, None, holds))
    room = Room(ratio, int(least + share * (most - least)), holds)
    mask = choose(times, memory, scores(network, seed), room)
    assert needed_bytes(memory, mask, room) <= room.bytes
    assert times.ratio(mask) <= max(ratio, times.ratio(network.head)) * (1 + 1e-9)
    assert (mask & network.head).sum() == network.head.sum()


@settings(max_examples=60, deadline=None)
@given(branched(), st.integers(0, 99))
def test_memory_to_spare_changes_nothing(profile, seed):
    times = times_of(profile)
    network, importance = times.network, scores(times.network, seed)
    ample = 10 * needed_bytes(network, times.everything, Room(1.0)) + 10**6
    free = choose(times, network, importance, Room(0.6))
    assert choose(times, network, importance, Room(0.6, ample)).tolist() == free.tolist()


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
    least, most = (needed_bytes(network, mask, Room(0.8)) for mask in (network.head, times.everything))
    values = [
        importance[choose(times, network, importance, Room(0.8, int(least + (most - least) * share)))].sum()
        for share in np.linspace(0, 1, 12)
    ]
    assert values[0] < values[-1]
    assert all(more >= less * 0.98 for less, more in itertools.pairwise(values)), [round(float(v), 2) for v in values]


def test_without_room_for_anything_the_classifier_is_left():
    times = times_of(straight((1, [(1, 0)]), (1, [(1, 0)])))
    assert choose(times, times.network, np.ones(2), Room(1.0, 1)).tolist() == [False, True]
    assert choose(times, times.network, np.ones(2), Room(0.01)).tolist() == [False, True]


def test_what_is_needed_counts_state_and_step():
    network = Network(straight((1, [(1, 0)]), (1, [(1, 0)])), 1, state_copies=2)
    assert needed_bytes(network, network.head, Room(1.0)) == 2 * 4 + (8 + 8 + 8 + 4), (
        "state, then input, output, its gradient and a weight's"
    )
