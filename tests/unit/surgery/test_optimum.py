"""The best widths under a bound, against trying them all."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snugfit.errors import ModelError
from snugfit.surgery import Choices, choose_widths, smallest_peak


@st.composite
def chains(draw):
    """Up to five blocks of up to four choices, of which some depend on the choice before."""
    blocks, before = [], 1
    for _ in range(draw(st.integers(1, 5))):
        own = draw(st.integers(1, 4))
        rows = before if draw(st.booleans()) else 1
        loss = draw(st.lists(st.integers(0, 6), min_size=own, max_size=own))
        peak, saved = (
            [draw(st.lists(st.integers(0, 30), min_size=own, max_size=own)) for _ in range(rows)] for _ in range(2)
        )
        blocks.append(Choices(np.array(loss, float), np.array(peak), np.array(saved)))
        before = own
    return blocks


def cost(blocks, choices):
    """Equations (1) to (3), as they are written."""
    saved, peaks, loss, before = 0, [], 0.0, 0
    for block, own in zip(blocks, choices, strict=True):
        row = before if len(block.peak) > 1 else 0
        peaks.append(saved + block.peak[row, own])
        saved, loss, before = saved + block.saved[row, own], loss + block.loss[own], own
    return loss, max(peaks)


@settings(max_examples=200, deadline=None)
@given(chains(), st.integers(0, 90))
def test_it_is_the_best_of_all(blocks, bound):
    every = [(*cost(blocks, c), c) for c in product(*(range(len(block.loss)) for block in blocks))]
    fitting = [found for found in every if found[1] <= bound]
    assert smallest_peak(blocks) == min(peak for _, peak, _ in every)
    if not fitting:
        with pytest.raises(ModelError, match=f"the smallest peak is {smallest_peak(blocks)} bytes"):
            choose_widths(blocks, bound)
        return
    found = choose_widths(blocks, bound)
    assert found.loss == min(loss for loss, *_ in fitting)
    assert cost(blocks, found.choices) == (found.loss, found.peak)
    assert found.peak <= bound


def test_pruning_early_can_spare_later_blocks():
    """A greedy choice prunes the block that is too large; cheaper is to save less before it."""
    full = Choices(np.array([0.0, 1.0]), np.array([[9, 5]]), np.array([[8, 2]]))
    small = Choices(np.array([0.0, 5.0]), np.array([[10, 4]]), np.array([[0, 0]]))
    assert choose_widths([full, small], 12).choices == (1, 0)


def test_a_long_chain_of_many_choices_is_no_matter():
    rng = np.random.default_rng(0)
    loss, sizes = np.sort(rng.random((18, 8)))[:, ::-1], np.sort(rng.integers(1, 10**6, (18, 8)))
    blocks = [Choices(loss[i], sizes[i : i + 1] * 3, sizes[i : i + 1]) for i in range(18)]
    least = smallest_peak(blocks)
    found = [choose_widths(blocks, int(least * factor)).loss for factor in (1.0, 1.5, 3.0)]
    assert found == sorted(found, reverse=True)
