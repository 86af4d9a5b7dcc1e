"""Stratified division and balanced limits, against what their definitions say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snugfit._data.split import balanced, stratified
from snugfit.errors import DataError

LABELS = st.lists(st.integers(0, 4), min_size=12, max_size=200).map(lambda xs: np.array(xs + [0, 1, 2, 3, 4] * 3))


@settings(max_examples=50, deadline=None)
@given(LABELS, st.integers(0, 2**40))
def test_parts_are_disjoint_complete_and_stratified(labels, seed):
    parts = stratified(labels, (0.1, 0.2), seed)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    counts = np.bincount(labels, minlength=5)
    for part, fraction in zip(parts[1:], (0.1, 0.2), strict=True):
        share = np.bincount(labels[part], minlength=5)
        assert (share >= 1).all()
        assert (np.abs(share - np.maximum(fraction * counts, 1)) <= 0.5 + 1e-9).all()


def test_division_depends_on_seed_only():
    labels = np.arange(100) % 4
    first, again, other = (stratified(labels, (0.2,), seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_class_too_small_is_named():
    with pytest.raises(DataError, match="'lonely' has 1 image"):
        stratified(np.array([0, 0, 0, 1]), (0.1,), 0, ("many", "lonely"))


@settings(max_examples=50, deadline=None)
@given(LABELS, st.integers(1, 250), st.integers(0, 9))
def test_balanced_takes_equal_counts_where_it_can(labels, limit, seed):
    chosen = balanced(labels, limit, seed)
    assert len(chosen) == len(set(chosen)) == min(limit, len(labels))
    counts, available = np.bincount(labels[chosen], minlength=5), np.bincount(labels, minlength=5)
    unexhausted = counts[counts < available]
    if len(unexhausted):
        assert counts.max() - unexhausted.min() <= 1
    assert set(balanced(labels, max(1, limit // 2), seed)) <= set(chosen)
