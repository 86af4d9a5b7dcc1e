import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import seconds

from snugfit.errors import UsageError
from snugfit.selection import backward_seconds, least_seconds

TIMES = st.floats(0, 1e3, allow_subnormal=False)


def test_figure_3_only_layer_3_of_5_is_selected():
    t_dw, t_dy = [1, 2, 4, 8, 16], [100, 200, 400, 800, 1600]
    assert backward_seconds([0, 0, 1, 0, 0], t_dw, t_dy) == 4 + 800 + 1600


def test_section_3_3_with_the_earliest_tensors_own_pass_left_out():
    t_dw, t_dy = [1, 1, 1, 10, 20, 1, 1], [1000, 1000, 1000, 1000, 2, 3, 4]
    assert backward_seconds([0, 0, 0, 1, 1, 0, 0], t_dw, t_dy) == 30 + 2 + 3 + 4


def test_equation_7_adds_up_to_the_time_of_the_selection():
    t_dw, t_dy = np.array([3.0, 5, 7, 11]), np.array([2.0, 4, 6, 8])
    with_1 = backward_seconds([0, 1, 0, 1], t_dw, t_dy)
    assert with_1 - backward_seconds([0, 0, 0, 1], t_dw, t_dy) == t_dw[1] + t_dy[2:4].sum()


def test_an_empty_selection_and_an_empty_network_take_no_time():
    assert backward_seconds([0, 0], [1, 2], [3, 4]) == 0
    assert backward_seconds([], [], []) == 0


@given(st.lists(st.tuples(st.booleans(), TIMES, TIMES), max_size=12))
def test_it_is_the_exact_time_rounded_once(tensors):
    mask, t_dw, t_dy = np.array(tensors, float).reshape(-1, 3).T
    assert backward_seconds(mask, t_dw, t_dy) == float(seconds(mask, t_dw, t_dy))


def test_least_seconds_counts_only_what_may_be_selected():
    t_dw, t_dy = [1, 9, 5], [1, 2, 3]
    assert least_seconds(t_dw, t_dy) == 5
    assert least_seconds(t_dw, t_dy, [1, 1, 0]) == 6
    assert least_seconds(t_dw, t_dy, [0, -1, 0]) == math.inf
    assert least_seconds([], []) == math.inf


@pytest.mark.parametrize(
    ("mask", "t_dw", "t_dy", "what"),
    [
        ([1], [1, 2], [1, 2], "mask has length 1, but there are 2"),
        ([1, 1], [1, 2], [1], "t_dy has length 1, but there are 2"),
        ([1, 1], [1, -2], [1, 2], "t_dw is negative at index 1"),
        ([1, 1], [1, 2], [math.nan, 2], "t_dy holds NaN or an infinite number at index 0"),
        ([1, 1], [1, math.inf], [1, 2], "t_dw holds NaN or an infinite number at index 1"),
        ([1, 1], [[1, 2]], [1, 2], "t_dw has shape"),
        ([1, 1], ["a", 2], [1, 2], "t_dw cannot be read as numbers"),
    ],
)
def test_what_cannot_be_is_refused(mask, t_dw, t_dy, what):
    with pytest.raises(UsageError, match=what):
        backward_seconds(mask, t_dw, t_dy)


def test_least_seconds_wants_one_importance_per_tensor():
    with pytest.raises(UsageError, match="importance has length 1"):
        least_seconds([1, 2], [1, 2], [1])
