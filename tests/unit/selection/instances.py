"""Random instances with two budgets."""

import numpy as np
from hypothesis import strategies as st
from oracle import bytes_needed

INPUTS = 4


@st.composite
def instances(draw, most=10):
    count = draw(st.integers(0, most))
    column = lambda part: np.array(draw(st.lists(part, min_size=count, max_size=count)))  # noqa: E731
    values = st.one_of(st.integers(-1, 6), st.floats(-0.5, 10, allow_subnormal=False))
    times = st.one_of(st.integers(0, 6), st.floats(1e-3, 6, allow_subnormal=False))
    columns = [column(part).astype(float) for part in (values, times, times)]
    own, inputs = column(st.integers(0, 9)), column(st.integers(-1, INPUTS - 1))
    saved = np.array(draw(st.lists(st.integers(0, 12), min_size=INPUTS, max_size=INPUTS)))
    return *columns, (own, inputs, saved, column(st.integers(0, 3)))


def all_bytes(masks, parts):
    return np.array([bytes_needed(mask, *parts) for mask in masks])
