"""The choice of the exit: tolerance and saturation."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit._core.record import ExitRecord
from snugfit.strategies.blockwise.partition import choose_exit, saturated, standard_error


def exits(*pairs):
    return [ExitRecord(f"u{i}", i, accuracy, parameters) for i, (accuracy, parameters) in enumerate(pairs)]


LADDER = exits((0.60, 10), (0.88, 20), (0.90, 40), (0.89, 80))

some_exits = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=8).map(
    lambda pairs: exits(*[(accuracy / 20, parameters) for accuracy, parameters in pairs])
)


@pytest.mark.parametrize(("tolerance", "index"), [(0.0, 2), (0.0199, 2), (0.021, 1), (0.31, 0), (1.0, 0)])
def test_tolerance_is_the_accuracy_given_up_for_size(tolerance, index):
    assert choose_exit(LADDER, 100, tolerance).index == index


def test_one_standard_error_by_default():
    error = math.sqrt(0.9 * 0.1 / 100)
    assert standard_error(0.9, 100) == pytest.approx(error) == pytest.approx(0.03)
    assert choose_exit(LADDER, 100).index == 1
    assert choose_exit(LADDER, 100_000).index == 2


def test_standard_error_at_the_ends():
    assert standard_error(0.0, 10) == standard_error(1.0, 10) == 0.0
    assert standard_error(0.5, 0) == 0.5


def test_of_equal_size_the_more_accurate_of_equal_accuracy_the_smaller():
    assert choose_exit(exits((0.8, 10), (0.9, 10)), 10, 0.5).index == 1
    assert choose_exit(exits((0.9, 30), (0.9, 10)), 10, 0.0).index == 1


@given(some_exits, st.floats(0, 1))
def test_the_choice_is_eligible_and_no_eligible_one_is_smaller(records, tolerance):
    chosen = choose_exit(records, 50, tolerance)
    best = max(r.val_accuracy for r in records)
    assert chosen.val_accuracy >= best - tolerance
    for other in records:
        if other.val_accuracy >= best - tolerance:
            assert (chosen.parameters, -chosen.val_accuracy) <= (other.parameters, -other.val_accuracy)


def test_the_first_block_is_never_saturated():
    assert not saturated(exits((0.1, 1), (0.1, 2)), [0, 1], 100)
    assert not saturated([], [0], 100)


def test_a_block_is_saturated_unless_it_gains_more_than_a_standard_error():
    """One standard error of 0.5 on 100 samples is 0.05."""
    assert saturated(exits((0.5, 1), (0.549, 2)), [1], 100)
    assert not saturated(exits((0.5, 1), (0.551, 2)), [1], 100)
    assert saturated(exits((0.5, 1), (0.2, 2), (0.54, 3)), [1, 2], 100)
    assert not saturated(exits((0.5, 1), (0.56, 2), (0.1, 3)), [1, 2], 100)


def test_the_best_exit_before_counts_wherever_it_was():
    assert saturated(exits((0.9, 1), (0.5, 2), (0.7, 3)), [2], 100)


def test_a_gain_of_exactly_one_standard_error_is_none():
    assert standard_error(0.5, 100) == 0.05
    assert saturated(exits((0.5, 1), (0.55, 2)), [1], 100)
