"""Floors are looked at seldom, and what is said of sizes in between is never too little."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit.profiling.probe import Floors, smallest_floor


class Unlimited:
    """A limit that is nowhere near."""

    def allow_address_space(self, extra_bytes):
        return nullcontext()


def test_every_size_is_looked_at_once():
    looked = []
    floors = Floors(lambda batch: looked.append(batch) or 10 * batch, Unlimited())
    assert [floors.at(4), floors.at(4), floors.smallest(), floors.below(2, 4)] == [40, 40, (1, 10), 20]
    assert looked == [4, 1]


def test_what_is_known_is_not_looked_at():
    assert Floors(lambda batch: 1 / 0, Unlimited(), {1: 3, 8: 24}).below(4, 8) == 12


def test_two_samples_where_one_is_refused():
    def look(batch):
        if batch == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return batch

    assert smallest_floor(look) == Floors(look, Unlimited()).smallest() == (2, 2)
    assert Floors(look, Unlimited(), {2: 2, 8: 8}).smallest() == (2, 2)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 50)), min_size=1, max_size=5),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_a_peak_of_many_lines_is_never_above_what_is_said(lines, batch, most):
    def look(size):
        return max(fixed + slope * size for fixed, slope in lines)

    assert Floors(look, Unlimited()).below(batch, most) >= look(batch)


@pytest.mark.parametrize("batch", [1, 8, 9])
def test_the_ends_are_exact(batch):
    assert Floors(lambda size: size * size, Unlimited()).below(batch, 8) == batch * batch
