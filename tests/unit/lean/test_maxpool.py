"""Max pooling that keeps a byte per output, and average poolings that keep nothing, against torch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from snugfit.lean import pooling, use_lean
from snugfit.memory.tensors import saved_bytes

sizes = st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 4), st.integers(1, 4)))


def smallest(size):
    return size if isinstance(size, int) else min(size)


@st.composite
def max_pools(draw):
    kernel = draw(sizes)
    padding = draw(st.integers(0, smallest(kernel) // 2))
    return nn.MaxPool2d(
        kernel, draw(st.none() | sizes), padding, draw(st.integers(1, 2)), ceil_mode=draw(st.booleans())
    )


@settings(deadline=None, max_examples=60)
@given(max_pools(), st.integers(0, 5), st.integers(1, 3), st.integers(7, 12), st.integers(7, 12), st.booleans())
def test_equals_torchs_bit_for_bit(assert_as_stock, pool, batch, channels, height, width, last):
    images = torch.randn(batch, channels, height, width, dtype=torch.float64).round()  # many ties
    assert_as_stock(pool, images.to(memory_format=torch.channels_last) if last else images)


@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
def test_however_many_images_are_taken_at_once(assert_as_stock, monkeypatch, chunk):
    monkeypatch.setitem(pooling.CHUNK, "cpu", chunk)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        images = torch.randn(7, 3, 9, 9, dtype=torch.float64).to(memory_format=memory_format)
        assert_as_stock(nn.MaxPool2d(3, 2, 1), images)


def test_nan_and_low_precision(assert_as_stock):
    images = torch.randn(2, 3, 9, 9)
    images[0, :, 4, 4] = float("nan")
    for dtype in (torch.float32, torch.bfloat16):
        assert_as_stock(nn.MaxPool2d(3, 2, 1), images.to(dtype))


@pytest.mark.parametrize(("kernel", "width"), [(2, 1), (16, 1), (17, 2), (182, 4)])
def test_the_smallest_type_that_numbers_the_taps(assert_as_stock, kernel, width):
    pool = nn.MaxPool2d(kernel, 1)
    images = torch.randn(1, 1, kernel + 1, kernel + 2, requires_grad=True)
    assert_as_stock(pool, images.detach())
    use_lean(pool)
    assert saved_bytes(lambda: pool(images), [images]) == 2 * 3 * width


def test_without_a_batch_axis_and_with_indices(assert_as_stock):
    assert_as_stock(nn.MaxPool2d(2), torch.randn(3, 8, 8, dtype=torch.float64))
    pool = nn.MaxPool2d(2, return_indices=True)
    use_lean(pool)
    assert len(pool(torch.randn(1, 1, 4, 4, requires_grad=True))) == 2


AVERAGES = [
    nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1), nn.AvgPool2d((2, 3), (1, 2), count_include_pad=False, ceil_mode=True),
    nn.AvgPool2d(2, divisor_override=3), nn.AdaptiveAvgPool2d(4), nn.AdaptiveAvgPool2d((3, None)),
    nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("pool", AVERAGES, ids=str)
def test_average_pools_equal_torchs_and_keep_nothing(assert_as_stock, pool):
    for size in ((2, 3, 8, 9), (3, 8, 9), (0, 3, 8, 8)):
        images = torch.randn(size, dtype=torch.float64)
        assert_as_stock(pool, images)
        if images.dim() == 4:
            assert_as_stock(pool, images.to(memory_format=torch.channels_last))
    use_lean(pool)
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    assert saved_bytes(lambda: pool(images)) == 0
