import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import all_bytes, instances
from oracle import bytes_needed, every_mask, seconds

from snugfit.errors import UsageError
from snugfit.selection import maximum_bytes


@settings(max_examples=200, deadline=None)
@given(instances(most=8), st.integers(0, 40), st.sampled_from([5, 40]))
def test_no_selection_within_the_time_needs_more_than_the_maximum(instance, budget, resolution):
    _, t_dw, t_dy, parts = instance
    masks = every_mask(len(t_dw))
    feasible = [mask for mask in masks if seconds(mask, t_dw, t_dy) <= budget]
    bound = maximum_bytes(t_dw, t_dy, budget, *parts, resolution)
    assert bound >= all_bytes(feasible, parts).max()
    assert bound <= bytes_needed(np.ones(len(t_dw), bool), *parts)


def test_a_case_worked_by_hand():
    arguments = [4, 4, 4], [0, 0, 0], 8, [5, 6, 7], [0, 0, -1], [10], [1, 2, 3]
    assert maximum_bytes(*arguments, resolution=1000) == 5 + 6 + 10 + 7 + 2 + 3, (
        "36, with the input twice, is limited by all there is"
    )


def test_no_tensors_and_no_time():
    assert maximum_bytes([], [], 1, [], [], [], []) == 0
    assert maximum_bytes([1], [1], 0, [5], [-1], [], [0]) == 0


def test_a_negative_time_budget_is_refused():
    with pytest.raises(UsageError, match="seconds is -1"):
        maximum_bytes([1], [1], -1, [5], [-1], [], [0])
