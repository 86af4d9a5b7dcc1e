"""Random instances with two budgets."""

import numpy as np
from hypothesis import strategies as st

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
    """Bytes of every selection, (2^N,)."""
    own, inputs, input_bytes, passing = (np.asarray(part, dtype=np.int64) for part in parts)
    if masks.shape[1] == 0:
        return np.zeros(len(masks), dtype=np.int64)
    saved = sum(size * masks[:, inputs == index].any(1) for index, size in enumerate(input_bytes))
    way = np.append(np.cumsum(passing[::-1])[::-1][1:], 0)
    return np.where(masks.any(1), masks @ own + saved + way[masks.argmax(1)], 0)
