import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network import resnet50
from oracle import best_value, every_mask, in_steps, seconds, seconds_of_all, steps_of_all

from snugfit.errors import UsageError
from snugfit.selection import backward_seconds, least_seconds, select, solve

VALUES = st.one_of(st.integers(-2, 6), st.floats(-1, 10, allow_subnormal=False))
FLOATS = st.one_of(st.just(0.0), st.floats(1e-6, 10, allow_subnormal=False))


@st.composite
def instances(draw, times, most=12):
    count = draw(st.integers(0, most))
    column = lambda part: np.array(draw(st.lists(part, min_size=count, max_size=count)), float)  # noqa: E731
    return column(VALUES), column(times), column(times)


def best_in_steps(importance, t_dw, t_dy, budget, resolution):
    """What ``select`` promises: everything worthwhile where it fits, else the best of the rounded instance."""
    if seconds(importance > 0, t_dw, t_dy) <= budget:
        return importance[importance > 0].sum()
    masks = every_mask(len(importance))
    fits = steps_of_all(masks, *in_steps(t_dw, t_dy, budget, resolution)) <= resolution
    return best_value(masks, importance, fits)


@settings(max_examples=400, deadline=None)
@given(instances(st.integers(0, 9)), st.integers(0, 60))
def test_whole_steps_are_solved_exactly(instance, budget):
    importance, t_dw, t_dy = instance
    mask = select(importance, t_dw, t_dy, budget, resolution=max(1, budget))
    masks = every_mask(len(importance))
    best = best_value(masks, importance, seconds_of_all(masks, t_dw, t_dy) <= budget)
    assert importance[mask].sum() == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert backward_seconds(mask, t_dw, t_dy) <= budget
    assert np.all(importance[mask] > 0)


@settings(max_examples=400, deadline=None)
@given(instances(FLOATS), st.one_of(st.just(0.0), st.floats(1e-3, 60)), st.integers(1, 60))
def test_any_times_are_rounded_upward_and_then_solved_exactly(instance, budget, resolution):
    importance, t_dw, t_dy = instance
    mask = select(importance, t_dw, t_dy, budget, resolution)
    value = importance[mask].sum()
    assert backward_seconds(mask, t_dw, t_dy) <= budget
    assert seconds(mask, t_dw, t_dy) <= budget
    best = best_in_steps(importance, t_dw, t_dy, budget, resolution)
    assert value == pytest.approx(best, rel=1e-9, abs=1e-12)
    masks = every_mask(len(importance))
    surely = seconds_of_all(masks, t_dw, t_dy) <= budget * (1 - (len(importance) + 1) / resolution)
    if surely.any():
        assert value >= best_value(masks, importance, surely) * (1 - 1e-9)


@settings(max_examples=300, deadline=None)
@given(instances(FLOATS), st.integers(1, 1000))
def test_the_least_budget_selects_something_and_less_does_not(instance, resolution):
    importance, t_dw, t_dy = instance
    least = least_seconds(t_dw, t_dy, importance)
    if math.isinf(least):
        assert not select(importance, t_dw, t_dy, 1e9, resolution).any()
        return
    assert select(importance, t_dw, t_dy, least, resolution).any()
    if least > 0:
        assert not select(importance, t_dw, t_dy, math.nextafter(least, 0), resolution).any()


def test_a_case_worked_by_hand():
    importance, t_dw, t_dy = [9, 4, 3, 1], [2, 2, 3, 1], [7, 1, 1, 2]
    assert select(importance, t_dw, t_dy, 6, 6).tolist() == [True, False, False, False], "2 + 4: the value is 9"
    assert select(importance, t_dw, t_dy, 5, 5).tolist() == [False, True, False, False], "2 + 3: the value is 4"
    assert select(importance, t_dw, t_dy, 8, 8).tolist() == [True, True, False, False], "4 + 4: the value is 13"
    assert select(importance, t_dw, t_dy, 12, 12).all(), "8 + 4, since the first tensor's 7 is not charged"


def test_ties_go_to_the_shorter_way():
    assert select([1, 1], [1, 1], [0, 1], 2, 2).tolist() == [False, True]


def test_tensors_without_worth_are_never_taken_even_for_nothing():
    assert not select([0, -1, 0], [0, 0, 0], [0, 0, 0], 5).any()


def test_no_time_admits_what_takes_none():
    assert select([1, 2, 3], [0, 1, 0], [5, 0, 0], 0).tolist() == [True, False, True]


def test_no_tensors_and_one():
    assert select([], [], [], 1).shape == (0,)
    assert select([1], [2], [9], 2).tolist() == [True]
    assert select([1], [2], [9], 1.9).tolist() == [False]


def test_no_limit_selects_everything_worthwhile():
    assert select([1, -1, 1], [1, 1, 1], [1, 1, 1], math.inf).tolist() == [True, False, True]


def test_skipped_and_solved_subproblems_are_all_there_are():
    (t_dw, t_dy), _ = resnet50(0)
    full = backward_seconds(np.ones(len(t_dw)), t_dw, t_dy)
    found = solve(np.ones(len(t_dw)), t_dw, t_dy, 0.3 * full)
    assert min(found.solved, found.invalid, found.redundant) > 0
    assert found.solved + found.redundant == len(t_dw) * 1001
    assert found.invalid >= len(t_dw) * 2333, "beyond 30 % of the time there is more than twice as much again"


@settings(max_examples=200, deadline=None)
@given(instances(st.integers(0, 9)), st.integers(1, 40))
def test_subproblems_are_counted_one_by_one(instance, budget):
    """P[k, t] is solved where the way past the tensors behind k leaves time, or just none."""
    importance, t_dw, t_dy = instance
    found = solve(importance, t_dw, t_dy, budget, budget)
    count = len(importance)
    if found.solved == 0:
        assert (found.invalid, found.redundant) == (0, 0)
        assert found.mask.tolist() == (importance > 0).tolist()
        return
    solved = sum(1 for k in range(count) for t in range(budget + 1) if t_dy[k + 1 :].sum() <= t)
    beyond = max(0, t_dw.sum() + t_dy[1:].sum() - budget)
    assert (found.solved, found.redundant) == (solved, count * (budget + 1) - solved)
    assert found.invalid == count * beyond


def test_of_equal_selections_the_one_with_fewer_tensors_near_the_output_is_kept():
    assert select([5, 2, 2], [3, 1, 1], [0, 0, 0], 4, 4).tolist() == [True, False, True]
    assert select([1, 3, 0, 3], [1, 2, 0, 2], [0, 0, 0, 0], 3, 3).tolist() == [True, False, False, True]


@pytest.mark.parametrize("budget", [-1, math.nan])
def test_budgets_that_are_none_are_refused(budget):
    with pytest.raises(UsageError, match="budget_seconds is"):
        select([1], [1], [1], budget)


@pytest.mark.parametrize("resolution", [0, 1.5])
def test_resolutions_that_are_none_are_refused(resolution):
    with pytest.raises(UsageError, match="whole number of steps"):
        select([1], [1], [1], 1, resolution)


def test_importances_must_be_numbers():
    with pytest.raises(UsageError, match="importance holds NaN"):
        select([math.nan], [1], [1], 1)
    with pytest.raises(UsageError, match="t_dw has length 1, but there are 2"):
        select([1, 2], [1], [1], 1)
