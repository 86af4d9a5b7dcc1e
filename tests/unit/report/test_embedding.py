"""Classes in two dimensions, and who is nearest to whom before that."""

import sys

import numpy as np
import pytest

from snugfit._report.pictures import FEWEST, closest_pair, kinship, nearest, project
from snugfit.errors import UnusableInputError, UsageError


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("classes", [FEWEST, 10, 95])
def test_a_projection_is_always_the_same_and_keeps_neighbours(classes):
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.normal(size=(-(-classes // 5), classes)), 5, 0)[:classes]
    rows += 0.01 * rng.normal(size=rows.shape)
    points = project(rows)
    assert points.shape == (classes, 2) and np.isfinite(points).all()
    assert np.array_equal(points, project(rows))
    if classes > 50:
        assert (nearest(points) // 5 == np.arange(classes) // 5).mean() > 0.9


def test_too_few_classes_are_refused():
    with pytest.raises(UsageError, match="4 classes or more, not 3"):
        project(np.eye(3))


def test_scikit_learn_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(UnusableInputError, match=r"snugfit\[demo\]"):
        project(np.eye(9))


def test_the_nearest_row_is_found():
    rows = np.random.default_rng(1).normal(size=(30, 7))
    gaps = np.linalg.norm(rows[:, None] - rows, axis=2) + np.diag([np.inf] * 30)
    assert np.array_equal(nearest(rows), gaps.argmin(1))
    assert set(closest_pair(rows)) == set(np.unravel_index(gaps.argmin(), gaps.shape))


def test_kinship_counts_neighbours_of_the_same_group():
    rows = np.array([[0.0, 0], [0, 1], [9, 9], [9, 8], [9, 7.5], [0, 1.5]])
    assert kinship(rows, ["a", "a", "b", "b", "b", "c"]) == (pytest.approx(4 / 6), pytest.approx(8 / 30))
