"""Rows that are needed and reached, against every row tried one by one, and against the paper's equations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit.tiling.geometry import EMPTY, SAME, Interval, Window, balanced, scaled_up, weighted

WINDOWS = st.builds(
    Window, st.integers(1, 7), st.integers(1, 4), st.integers(0, 4), st.integers(0, 4), st.integers(1, 3)
)
INTERVALS = st.builds(lambda start, size: Interval(start, start + size), st.integers(-9, 20), st.integers(1, 9))


def read_by(window, output):
    """Every input row that an output reads, padding included."""
    return {output * window.stride - window.before + window.dilation * tap for tap in range(window.kernel)}


@given(WINDOWS, INTERVALS)
def test_what_outputs_need(window, outputs):
    rows = set().union(*(read_by(window, output) for output in range(outputs.start, outputs.stop)))
    assert window.needs(outputs) == Interval(min(rows), max(rows) + 1)


@given(WINDOWS, INTERVALS)
def test_what_inputs_reach(window, inputs):
    """The first and the last output whose rows, from its first to its last one, meet the inputs."""
    found = window.reaches(inputs)
    for output in range(-40, 60):
        rows = read_by(window, output)
        meets = min(rows) < inputs.stop and max(rows) >= inputs.start
        if found:
            assert meets == (found.start <= output < found.stop) or _between(window, output, found)
        else:
            assert not meets


def _between(window, output, found):
    """Outputs between two that meet the inputs, where a stride beyond the reach leaves gaps."""
    return window.stride > window.reach and found.start <= output < found.stop


@given(WINDOWS, st.integers(1, 40))
def test_number_of_outputs(window, size):
    padded = range(-window.before, size + window.after)
    fitting = [
        o for o in range(100) if min(read_by(window, o)) >= padded.start and max(read_by(window, o)) < padded.stop
    ]
    assert window.outputs(size) == len(fitting)


@given(st.sampled_from([1, 3, 5, 7]), st.integers(1, 3), INTERVALS)
def test_the_papers_equations(kernel, stride, tile):
    """Coordinates of tiles are inclusive there; 4.1 reads stride - 1 rows too many on the high side."""
    conv, pool = Window(kernel, stride, kernel // 2, kernel // 2), Window(stride, stride)
    low, high = tile.start, tile.stop - 1
    needed = conv.needs(tile)
    assert needed.start == low * stride - kernel // 2  # 4.1a
    assert needed.stop - 1 == high * stride + kernel // 2 + (stride - 1) - (stride - 1)  # 4.1c, less what is too much
    assert pool.needs(tile) == Interval(low * stride, high * stride + (stride - 1) + 1)  # 4.2
    reached = conv.reaches(tile)
    first, last = math.ceil((low - kernel // 2) / stride), (high + kernel // 2) // stride  # 4.3
    assert reached == (Interval(first, last + 1) if first <= last else EMPTY)
    assert pool.reaches(tile) == Interval(low // stride, high // stride + 1)  # 4.4


def test_figure_4_4_b():
    """The lower right tile of 2x2 on a 16x16 delta map, surrounded by neighbours, to the third map behind it."""
    conv2, conv1, pool = Window(3, 2, 1, 1), Window(3, 1, 1, 1), Window(2, 2)
    first = conv2.reaches(Interval(8, 16))
    second = conv1.reaches(first)
    third = pool.reaches(second)
    assert (first, second, third) == (Interval(4, 9), Interval(3, 10), Interval(1, 5))


@given(INTERVALS)
def test_row_by_row(rows):
    assert SAME.needs(rows) == SAME.reaches(rows) == rows


def test_nothing_needs_and_reaches_nothing():
    assert Window(3, 2, 1, 1).needs(EMPTY) == Window(3, 2, 1, 1).reaches(EMPTY) == EMPTY
    assert Window(1, 3).reaches(Interval(1, 3)) == EMPTY  # rows between two that are read


@given(INTERVALS, INTERVALS)
def test_sets_of_rows(a, b):
    def rows(interval):
        return set(range(interval.start, interval.stop))

    assert rows(a & b) == rows(a) & rows(b)
    assert rows(a.hull(b)) == set(range(min(rows(a) | rows(b)), max(rows(a) | rows(b)) + 1))
    assert (a in b) == (rows(a) <= rows(b))
    assert rows(a.clip(7)) == rows(a) & set(range(7))


@given(
    st.builds(Interval, st.integers(-3, 9), st.integers(-3, 9)),
    st.builds(Interval, st.integers(-3, 9), st.integers(-3, 9)),
)
def test_sets_of_rows_that_may_be_empty(a, b):
    def rows(interval):
        return set(range(interval.start, interval.stop))

    both, either = rows(a) & rows(b), rows(a) | rows(b)
    assert (a & b) == (Interval(min(both), max(both) + 1) if both else EMPTY)
    assert rows(a.hull(b)) == (set(range(min(either), max(either) + 1)) if either else set())
    assert (a in b) == (rows(a) <= rows(b))
    assert len(a) == len(rows(a)) and bool(a) == bool(rows(a))
    assert 3 not in a and (0, 1) not in a
    assert a.within(Interval(-3, 9)) == (slice(a.start + 3, a.stop + 3) if rows(a) else slice(0, 0))
    assert Interval.whole(len(a)) == Interval(0, len(a))


@given(WINDOWS, st.integers(1, 30), st.integers(0, 30), st.integers(0, 30))
def test_outputs_that_read_nothing_else(window, size, first, last):
    """Of the map's rows alone: what an output reads of the padding does not count."""
    rows = Interval(min(first, size), min(last, size))
    found = window.inside(rows, size)
    for output in range(window.outputs(size)):
        spanned = range(min(read_by(window, output)), max(read_by(window, output)) + 1)
        read = [row for row in spanned if 0 <= row < size]
        if read:  # what reads padding alone may count or not
            assert (found.start <= output < found.stop) == all(rows.start <= row < rows.stop for row in read)
    assert found or found == EMPTY
    assert found.start >= 0 and found.stop <= window.outputs(size)


def test_place_in_a_tensor():
    held = list(range(5, 12))
    assert held[Interval(7, 9).within(Interval(5, 12))] == [7, 8]
    assert held[EMPTY.within(Interval(5, 12))] == []


@given(st.integers(0, 60), st.integers(1, 12))
def test_balanced_parts(size, count):
    parts = balanced(size, count)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(size))
    lengths = [len(part) for part in parts]
    assert len(parts) == count and max(lengths) - min(lengths) <= 1


@given(st.integers(0, 60), st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_weighted_parts(size, weights):
    parts = weighted(size, tuple(weights))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(size))
    for part, weight in zip(parts, weights, strict=True):
        assert abs(len(part) - size * weight / sum(weights)) <= 1


@pytest.mark.parametrize("weights", [(), (1.0, 0.0), (-1.0,)])
def test_weights_must_be_positive(weights):
    with pytest.raises(ValueError, match="above 0"):
        weighted(10, weights)


@given(st.integers(1, 60), st.integers(1, 5), WINDOWS)
def test_parts_of_what_a_layer_reads_cover_it(size, count, window):
    parts = scaled_up(balanced(window.outputs(size), count), window, size)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(size))
    assert len(parts) == count


def test_what_can_be_left_out_at_both_ends():
    whole = Interval(-1, 9)
    assert whole.around(Interval(0, 7)) == 1 and whole.without(1) == Interval(0, 8)
    assert whole.around(Interval(-1, 5)) == 0 == whole.around(Interval(3, 12)) == whole.around(Interval(0, 0))
