"""Lines fitted to measured points: least squares, and an upper bound of every point."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit._core.profile import ProbePoint
from snugfit.memory import fit_line


def points(*sizes):
    return [ProbePoint(batch, peak, seconds) for batch, peak, seconds in sizes]


measurements = st.lists(
    st.tuples(st.integers(1, 512), st.integers(1, 10**10), st.floats(0, 100)), min_size=1, max_size=6
).map(lambda sizes: points(*sizes))


@given(measurements)
def test_no_measured_point_lies_above_the_line(measured):
    line = fit_line("p", measured)
    for point in measured:
        assert line.bytes_at(point.batch) >= point.peak_bytes
    assert line.sample_bytes >= 0 and line.residual_bytes >= 0


@given(st.integers(0, 10**9), st.integers(0, 10**7), st.lists(st.integers(1, 512), min_size=2, max_size=5, unique=True))
def test_points_on_a_line_give_that_line(fixed, sample, batches):
    line = fit_line("p", points(*[(b, fixed + sample * b, 0.5 + 0.25 * b) for b in batches]))
    assert line.sample_bytes == pytest.approx(sample, rel=1e-9, abs=1e-5)
    assert line.fixed_bytes == pytest.approx(fixed, rel=1e-6, abs=1.0)
    assert line.residual_bytes <= 1.0
    assert line.seconds_at(1000) == pytest.approx(0.5 + 250)


def test_least_squares_by_hand():
    """Through (1, 10), (2, 30), (3, 20): slope 5, intercept 10; (2, 30) lies 10 above it."""
    line = fit_line("p", points((1, 10, 0), (2, 30, 0), (3, 20, 0)))
    assert (line.sample_bytes, line.fixed_bytes, line.residual_bytes) == (5.0, 10.0, 10.0)
    assert line.bytes_at(2) == 31


def test_a_single_point_is_proportional():
    line = fit_line("p", points((4, 100, 2.0)))
    assert (line.sample_bytes, line.fixed_bytes, line.residual_bytes) == (25.0, 0.0, 0.0)
    assert line.seconds_at(8) == 4.0


def test_repeated_batches_are_proportional_to_the_largest():
    line = fit_line("p", points((4, 100, 1.0), (4, 120, 1.0)))
    assert line.bytes_at(4) == 121


def test_a_falling_line_is_taken_as_flat_at_its_top():
    line = fit_line("p", points((1, 100, 0), (2, 80, 0)))
    assert (line.sample_bytes, line.fixed_bytes) == (0.0, 100.0)


def test_points_are_kept_in_order_and_none_is_refused():
    line = fit_line("p", points((8, 9, 0), (2, 3, 0)), smallest_batch=2)
    assert [point.batch for point in line.points] == [2, 8] and line.smallest_batch == 2
    with pytest.raises(ValueError, match="no measured point"):
        fit_line("p", [])
