"""Lines over batch size: bounds, interpolation and the largest batch."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snugfit._core.profile import ProbeLine, ProbePoint


def line(fixed, sample, residual=0.0, smallest=1, **kwargs):
    return ProbeLine("p", fixed, sample, residual, 0.5, 0.25, smallest_batch=smallest, **kwargs)


@given(
    st.floats(-1e8, 1e9), st.one_of(st.just(0.0), st.floats(0.5, 1e8)), st.floats(0, 1e7),
    st.one_of(st.integers(0, 10**10), st.floats(0, 1e10), st.just(float("inf"))), st.integers(1, 2048),
    st.integers(1, 2),
)  # fmt: skip
@example(0.0, 33.2, 0.0, 100, 128, 1)
@example(0.0, 0.1, 0.0, 1, 128, 1)
def test_the_largest_batch_fits_and_the_next_does_not(fixed, sample, residual, available, limit, smallest):
    probe = line(fixed, sample, residual, smallest)
    largest = probe.largest_batch(available, limit)
    assert largest == 0 or smallest <= largest <= limit
    if largest:
        assert probe.bytes_at(largest) <= available
        assert largest == limit or probe.bytes_at(largest + 1) > available
    else:
        assert probe.bytes_at(smallest) > available or smallest > limit


def test_by_hand():
    probe = line(10.0, 20.0, 5.0)
    assert [probe.bytes_at(batch) for batch in (1, 2, 10)] == [36, 56, 216]
    assert probe.largest_batch(56, 100) == 2
    assert probe.largest_batch(55, 100) == 1
    assert probe.largest_batch(35, 100) == 0
    assert probe.largest_batch(10**9, 100) == 100
    assert line(10.0, 20.0, 5.0, smallest=2).largest_batch(36, 100) == 0


def test_a_batch_size_that_was_measured_makes_no_new_kernels():
    probe = line(0.0, 10.0, points=(ProbePoint(4, 40, 1.0), ProbePoint(12, 120, 1.0)), shape_bytes=25.0)
    assert [probe.bytes_at(batch) for batch in (4, 5, 12)] == [41, 76, 121]
    assert probe.largest_batch(121, 100) == 12 and probe.largest_batch(120, 100) == 9
    assert probe.largest_batch(41, 100) == 4 and probe.largest_batch(40, 100) == 1


def test_batches_above_the_largest_measured_one_may_need_more_workspace():
    probe = line(0.0, 10.0, points=(ProbePoint(4, 40, 1.0), ProbePoint(12, 120, 1.0)), partial_bytes=25)
    assert [probe.bytes_at(batch) for batch in (4, 5, 12, 13)] == [41, 51, 121, 156]
    assert probe.largest_batch(155, 100) == 12 and probe.largest_batch(156, 100) == 13
    assert line(0.0, 10.0).measured_batch == 0


def test_seconds_are_measured_ones_where_there_are_any():
    probe = line(0, 1, points=(ProbePoint(4, 10, 9.0),))
    assert probe.seconds_at(4) == 9.0
    assert probe.seconds_at(8) == pytest.approx(2.5)
    assert ProbeLine("p", 0, 1, 0, -5.0, 0.25).seconds_at(2) == 0.0
