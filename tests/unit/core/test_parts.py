"""Batches in parts of nearly equal size, against numpy's division."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from snugfit._core.parts import epoch_parts, largest_parts, part_sizes


@given(st.integers(1, 300), st.integers(1, 300))
def test_sizes_differ_by_at_most_one_and_add_up(images, parts):
    sizes = part_sizes(images, parts)
    assert list(sizes) == [len(part) for part in np.array_split(range(images), parts)]


@given(st.integers(1, 300))
def test_the_number_of_parts_follows_from_the_largest(images):
    found = largest_parts(images)
    assert set(found) == {part_sizes(images, parts)[0] for parts in range(1, images + 1)}
    assert list(found) == sorted(found)
    for size in found:
        assert part_sizes(images, math.ceil(images / size))[0] == size


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 8), st.integers(0, 3))
def test_an_epoch_has_every_full_batch_or_all_that_there_is(count, batch_size, parts, start):
    parts = min(parts, batch_size)
    found = [list(range(count))[part] for part in epoch_parts(count, batch_size, parts, start)]
    steps = [
        range(count)[at : at + batch_size] for at in range(0, max(count // batch_size, 1) * batch_size, batch_size)
    ]
    wanted = steps[start:]
    assert [row for part in found for row in part] == [row for step in wanted for row in step]
    assert all(len(part) <= math.ceil(batch_size / parts) for part in found)
    if count >= batch_size:
        assert [len(part) for part in found] == [len(p) for step in wanted for p in np.array_split(step, parts)]
