"""Bases and frequencies of LLS."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugfit.local.lls import cosine, frequencies, make_basis, random, square


@given(st.integers(2, 40), st.integers(8, 300))
def test_spread_frequencies_lie_between_one_period_and_nyquist_at_equal_distances(classes, length):
    found = frequencies("spread", classes, length)
    gaps = found.diff()
    assert 2 * math.pi / length < found[0] and found[-1] < math.pi
    torch.testing.assert_close(gaps, gaps[:1].expand_as(gaps))


def test_published_frequencies_are_those_of_the_authors():
    assert frequencies("published", 3, 77).tolist() == [50.0, 281.0, 512.0]


def test_waves_are_taken_at_the_samples_1_to_t():
    angular = torch.tensor([0.3, 1.1], dtype=torch.float64)
    by_hand = [[math.cos(f * t) for t in range(1, 6)] for f in (0.3, 1.1)]
    torch.testing.assert_close(cosine(angular, 5), torch.tensor(by_hand, dtype=torch.float64))
    signs = [[math.copysign(1, value) for value in row] for row in by_hand]
    assert square(angular, 5).tolist() == signs


@pytest.mark.parametrize("name", ["cosine", "square"])
def test_a_spread_basis_is_nearly_orthogonal(name):
    basis = make_basis(name, "spread", 10, 2048)
    rows = basis / basis.norm(dim=1, keepdim=True)
    overlap = (rows @ rows.T - torch.eye(10)).abs().max()
    assert overlap < 0.35


@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_published_square_rows_of_ten_classes_hardly_overlap(length):
    rows = make_basis("square", "published", 10, length)
    overlap = (rows @ rows.T / length - torch.eye(10)).abs().max()
    assert set(rows.unique().tolist()) == {-1.0, 1.0}
    assert overlap < 0.2


def test_the_random_basis_has_its_scale_and_its_seed():
    basis = make_basis("random", "spread", 10, 2048, seed=3)
    assert basis.std().item() == pytest.approx(0.1, rel=0.02)
    assert torch.equal(basis, make_basis("random", "published", 10, 2048, seed=3))
    assert not torch.equal(basis, make_basis("random", "spread", 10, 2048, seed=4))


def test_spread_frequencies_by_hand():
    """Of 8 samples one period is pi / 4, and Nyquist pi: two between them lie at a half and three quarters of pi."""
    found = frequencies("spread", 2, 8)
    torch.testing.assert_close(
        found, torch.tensor([math.pi / 2, 3 * math.pi / 4], dtype=torch.float64), rtol=1e-15, atol=0
    )


def test_bases_are_computed_in_float64_and_handed_out_in_float32():
    """Published phases reach 10^6 radians, of which float32 knows some hundredths."""
    for rule in ("spread", "published"):
        angular = frequencies(rule, 7, 2048)
        assert angular.dtype == torch.float64
        by_hand = [[math.cos(f * t) for t in range(1, 2049)] for f in angular.tolist()]
        torch.testing.assert_close(cosine(angular, 2048), torch.tensor(by_hand, dtype=torch.float64), rtol=0, atol=1e-9)
        assert square(angular, 5).dtype == torch.float64
        assert make_basis("cosine", rule, 7, 9).dtype == torch.float32
    assert random(2, 3, 0).dtype == torch.float64
    assert make_basis("random", "spread", 2, 3).tolist() == random(2, 3, 0).float().tolist()


def test_waves_follow_the_type_of_their_frequencies():
    angular = torch.tensor([0.5, 0.0], dtype=torch.float32)
    assert cosine(angular, 3).dtype == square(angular, 3).dtype == torch.float32
    assert square(angular, 3)[1].tolist() == [1.0, 1.0, 1.0]
    assert make_basis("cosine", "spread", 4, 6).tolist() == cosine(frequencies("spread", 4, 6), 6).float().tolist()
