"""Pooling to at most 2048 values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from snugfit.local import Latents, pooled_side


@pytest.mark.parametrize(
    ("shapes", "sides"),
    [
        ([(128, 32, 32), (256, 32, 32), (256, 16, 16), (512, 8, 8), (512, 4, 4)], [4, 2, 2, 2, 2]),
        ([(32, 32, 32), (64, 16, 16), (128, 8, 8)], [4, 2, 2]),
        ([(96, 32, 32), (192, 16, 16), (512, 8, 8)], [4, 2, 2]),
        ([(32, 64, 64), (64, 64, 64), (128, 32, 32), (256, 16, 16), (512, 8, 8), (1024, 4, 4)], [8, 4, 4, 2, 2, 1]),
    ],
    ids=["vgg8", "smallconv", "smallconvl", "mobilenet_v1"],
)
def test_sides_that_the_authors_set_by_hand(shapes, sides):
    assert [pooled_side(*shape) for shape in shapes] == sides


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3000))
def test_no_more_values_than_the_limit_and_no_more_pixels_than_there_are(channels, height, width, limit):
    side = pooled_side(channels, height, width, limit)
    assert 1 <= side <= min(height, width)
    assert channels * side**2 <= limit or side == 1
    assert side & (side - 1) == 0


@pytest.mark.parametrize("shape", [(6, 8, 8), (2000, 4, 4), (5, 7, 9), (3000,), (12,)])
def test_latents_are_what_adaptive_pooling_gives(shape):
    latents = Latents(shape)
    features = torch.randn(3, *shape)
    if len(shape) == 3:
        expected = F.adaptive_avg_pool2d(features, latents.side).flatten(1)
    else:
        expected = F.adaptive_avg_pool1d(features[:, None], latents.length)[:, 0]
    assert latents(features).shape == (3, latents.length)
    torch.testing.assert_close(latents(features), expected)
    assert latents.length <= 2048


def test_smaller_windows_leave_more_of_a_map():
    assert [pooled_side(32, 32, 32, window=window) for window in (16, 8, 4, 1)] == [2, 4, 8, 8]
