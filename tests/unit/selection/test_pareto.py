import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import all_bytes, instances
from network import resnet50
from oracle import best_value, bytes_needed, every_mask, in_steps, seconds, steps_of_all

from snugfit.errors import UsageError
from snugfit.selection import (
    Limits,
    backward_seconds,
    byte_model,
    select,
    solve_within,
)


def select_within(importance, t_dw, t_dy, budget, own, inputs, saved, passing, memory, resolution=1000):
    model = byte_model(own, inputs, saved, passing)
    return solve_within(importance, t_dw, t_dy, model, Limits(budget, memory, resolution)).mask


@settings(max_examples=300, deadline=None)
@given(instances(), st.integers(0, 40), st.integers(0, 70), st.sampled_from([7, 40]))
def test_it_is_the_best_within_both_budgets(instance, budget, memory, resolution):
    importance, t_dw, t_dy, parts = instance
    mask = select_within(importance, t_dw, t_dy, budget, *parts, memory, resolution)
    assert seconds(mask, t_dw, t_dy) <= budget
    assert bytes_needed(mask, *parts) <= memory
    value, worthwhile = importance[mask].sum(), importance > 0
    if seconds(worthwhile, t_dw, t_dy) <= budget and bytes_needed(worthwhile, *parts) <= memory:
        assert np.array_equal(mask, worthwhile)
        return
    masks = every_mask(len(importance))
    fits = steps_of_all(masks, *in_steps(t_dw, t_dy, budget, resolution)) <= resolution
    fits[fits] = all_bytes(masks[fits], parts) <= memory
    assert value == pytest.approx(best_value(masks, importance, fits), rel=1e-8, abs=1e-12)


@settings(max_examples=300, deadline=None)
@given(instances(), st.integers(0, 40))
def test_with_memory_to_spare_it_is_select(instance, budget):
    importance, t_dw, t_dy, parts = instance
    ample = bytes_needed(np.ones(len(importance), bool), *parts)
    within = select_within(importance, t_dw, t_dy, budget, *parts, ample, 40)
    assert np.array_equal(within, select(importance, t_dw, t_dy, budget, 40))


@given(instances())
def test_bytes_of_a_selection(instance):
    importance, _, _, parts = instance
    mask = importance > 2
    needed = bytes_needed(mask, *parts)
    assert byte_model(*parts).of(mask) == needed == all_bytes(mask[None], parts)[0]


def test_a_shared_input_is_charged_once():
    own, inputs, saved, passing = [1, 1, 1], [0, 0, -1], [10], [0, 0, 0]
    assert byte_model(own, inputs, saved, passing).of(np.array([True, True, False])) == 12
    within = select_within([2, 2, 1], [1, 1, 1], [0, 0, 0], 9, own, inputs, saved, passing, 12)
    assert within.tolist() == [True, True, False], "together they are worth the input that each alone is not"


def test_the_earliest_tensor_pays_for_the_input_of_later_ones():
    within = select_within([2, 2, 5, 5], [1, 1, 1, 1], [0] * 4, 9, [0] * 4, [0, 0, 0, 1], [10, 10], [0] * 4, 10)
    assert within.tolist() == [True, True, True, False]


def test_bytes_of_passing_are_charged_after_the_earliest():
    arguments = [0, 0, 0], [-1, -1, -1], [], [9, 2, 3]
    assert byte_model(*arguments).of(np.array([True, False, False])) == 5
    assert select_within([9, 1, 1], [1, 1, 1], [0, 0, 0], 3, *arguments, 4).tolist() == [False, True, True]


@pytest.mark.parametrize("memory", [0, 3])
def test_where_nothing_fits_nothing_is_selected(memory):
    assert not select_within([1, 1], [1, 1], [1, 1], 9, [4, 4], [-1, -1], [], [0, 0], memory).any()


def test_memory_without_limit_and_no_time():
    arguments = [1, 1], [0, 1], [1, 0], 0, [4, 4], [-1, -1], [], [0, 0]
    assert select_within(*arguments, math.inf).tolist() == [True, False]
    assert not select_within(*arguments, 3).any()


@pytest.mark.parametrize("spread", [1, 3])
@pytest.mark.parametrize("share", [0.15, 0.4])
def test_a_resnet_50_is_solved_exactly_and_with_few_labels(spread, share):
    (t_dw, t_dy), parts = resnet50(1)
    everything = np.ones(len(t_dw), bool)
    importance = np.random.default_rng(2).lognormal(0, spread, len(t_dw))
    model, limit = byte_model(*parts), int(share * byte_model(*parts).of(everything))
    budget = 0.6 * backward_seconds(everything, t_dw, t_dy)
    found = solve_within(importance, t_dw, t_dy, model, Limits(budget, limit))
    assert found.bound == found.value, "proved"
    assert found.value == pytest.approx(importance[found.mask].sum())
    assert model.of(found.mask) <= limit
    assert backward_seconds(found.mask, t_dw, t_dy) <= budget
    assert found.most_labels < 2000, "far below the limit"


def test_a_resnet_50_whose_importance_follows_cost_is_solved_exactly():
    (t_dw, t_dy), parts = resnet50(3)
    everything = np.ones(len(t_dw), bool)
    model = byte_model(*parts)
    charged = parts[0] + np.append(parts[2], 0)[parts[1]]
    importance = (t_dw / t_dw.sum() + charged / charged.sum()) * np.random.default_rng(4).lognormal(0, 0.1, len(t_dw))
    budget = 0.6 * backward_seconds(everything, t_dw, t_dy)
    found = solve_within(importance, t_dw, t_dy, model, Limits(budget, int(0.15 * model.of(everything))))
    assert found.bound == found.value


def test_a_label_limit_gives_a_selection_that_fits_and_a_bound_that_holds():
    (t_dw, t_dy), parts = resnet50(5)
    everything = np.ones(len(t_dw), bool)
    model, importance = byte_model(*parts), np.random.default_rng(6).lognormal(0, 3, len(t_dw))
    budget, limit = 0.6 * backward_seconds(everything, t_dw, t_dy), int(0.15 * model.of(everything))
    exact, limited = (
        solve_within(importance, t_dw, t_dy, model, Limits(budget, limit, label_limit=labels)) for labels in (None, 3)
    )
    assert model.of(limited.mask) <= limit
    assert limited.most_labels <= 3
    assert limited.value <= exact.value * (1 + 1e-9)
    assert limited.bound >= exact.value * (1 - 1e-9)


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        (([1], [-1, -1], [], [0, 0]), "inputs has length 2, but there are 1"),
        (([1], [-1], [], [0]), "own_bytes has length 1, but there are 2"),
        (([1, 1], [-1, 0], [], [0, 0]), "inputs names an input other than"),
        (([1, 1], [-1, -2], [5], [0, 0]), "inputs names an input other than"),
        (([1, -1], [-1, -1], [], [0, 0]), "own_bytes is negative at index 1"),
        (([1, 1.5], [-1, -1], [], [0, 0]), "own_bytes holds fractions"),
        (([1, 1], [-1, -1], [], [0, math.nan]), "pass_bytes holds NaN"),
    ],
)
def test_bytes_that_cannot_be_are_refused(parts, what):
    with pytest.raises(UsageError, match=what):
        select_within([1, 1], [1, 1], [1, 1], 9, *parts, 5)


def test_memory_budgets_that_are_none_are_refused():
    with pytest.raises(UsageError, match="memory_bytes is -1"):
        select_within([1], [1], [1], 9, [1], [-1], [], [0], -1)


def test_sums_of_bytes_that_all_differ_end_at_the_label_limit_with_a_close_bound():
    rng, count = np.random.default_rng(7), 30
    own, t_dw, t_dy = rng.integers(10**7, 10**9, count), rng.uniform(0.1, 1, count), rng.uniform(0, 0.1, count)
    model = byte_model(own, np.full(count, -1), [], np.zeros(count))
    budget = 0.5 * backward_seconds(np.ones(count), t_dw, t_dy)
    limits = Limits(budget, int(0.3 * own.sum()), label_limit=500)
    found = solve_within(own / 1e9, t_dw, t_dy, model, limits)
    assert model.of(found.mask) <= 0.3 * own.sum()
    assert found.value <= found.bound <= 1.01 * found.value
    assert found.most_labels == 500
