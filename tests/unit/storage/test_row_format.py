"""Stored rows: exact where they can be, bounded in error where they cannot."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugfit._storage.activation_cache import RowFormat

SHAPES = [(3, 9, 8), (5, 2, 3), (1, 8, 8), (4, 1, 1), (7,)]


def affine_oracle(row, per_channel):
    """Quantise one row to 8 bits and back, in float64: per channel, or with one range."""
    values = row.reshape(row.shape[0], -1) if per_channel else row.reshape(1, -1)
    low, high = values.min(1, keepdims=True), values.max(1, keepdims=True)
    step = (high - low) / 255
    levels = np.round((values - low) / np.where(step > 0, step, 1))
    return (low + levels * step).reshape(row.shape), (high - low) / 510


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_floats_round_as_torch_does(shape, dtype, channels_last):
    features = torch.randn(3, *shape)
    if channels_last and features.dim() == 4:
        features = features.to(memory_format=torch.channels_last)
    rows = RowFormat(shape, dtype)
    raw = rows.encode(features)
    assert raw.dtype == torch.uint8 and raw.shape == (3, rows.row_bytes)
    decoded = rows.decode(raw)
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, features.to(getattr(torch, dtype)).float())
    if features.dim() == 4:
        assert decoded.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", SHAPES)
def test_uint8_equals_the_float64_oracle(shape):
    torch.manual_seed(0)
    features = torch.randn(4, *shape) * torch.tensor([1e-3, 1.0, 1e3, 0.0]).view(-1, *[1] * len(shape)) + 0.5
    rows = RowFormat(shape, "uint8")
    decoded = rows.decode(rows.encode(features))
    for got, row in zip(decoded.double().numpy(), features.double().numpy(), strict=True):
        expected, half_step = affine_oracle(row, per_channel=rows.ranges > 1)
        scale = np.abs(row).max()
        assert np.abs(got - row).max() <= half_step.max() + 1e-6 * scale
        assert np.mean(np.abs(got - expected) > 1e-6 * scale) < 0.02


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=6, max_size=6),
    st.floats(2.0**-126, 2.0**20, width=32),
)
def test_uint8_error_bound_holds_for_any_values(values, scale):
    features = torch.tensor(values).view(1, 6) * scale
    rows = RowFormat((6,), "uint8")
    error = (rows.decode(rows.encode(features)).double() - features.double()).abs().max()
    spread = features.double().max() - features.double().min()
    assert error <= spread / 510 + 1e-6 * features.double().abs().max() + 1e-35


def test_each_channel_of_a_large_map_has_its_own_range():
    features = torch.randn(2, 2, 8, 8)
    features[:, 1] *= 1e4
    rows = RowFormat((2, 8, 8), "uint8")
    assert rows.ranges == 2 and rows.row_bytes == 2 * 64 + 2 * 8
    error = (rows.decode(rows.encode(features)) - features).abs()
    assert error[:, 0].max() < 0.02 < error[:, 1].max()


def test_rows_do_not_depend_on_the_batch_that_they_are_written_in():
    features = torch.randn(5, 3, 8, 8)
    rows = RowFormat((3, 8, 8), "uint8")
    assert torch.equal(rows.encode(features)[2:3], rows.encode(features[2:3]))


def test_slices_join_without_a_seam(monkeypatch):
    features = torch.randn(7, 3, 8, 8)
    rows = RowFormat((3, 8, 8), "uint8")
    whole = rows.encode(features)
    monkeypatch.setattr("snugfit._storage.activation_cache._SLICE_BYTES", 2 * 4 * 192)
    assert torch.equal(rows.encode(features), whole)


def test_float16_saturates():
    rows = RowFormat((4,), "float16")
    decoded = rows.decode(rows.encode(torch.tensor([[1e6, -1e6, 65504.0, 1.0]])))
    assert decoded.tolist() == [[65504.0, -65504.0, 65504.0, 1.0]]


def test_float32_of_a_channels_last_map_is_a_view():
    features = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert RowFormat((3, 4, 4), "float32").encode(features).data_ptr() == features.data_ptr()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 120), ("float16", 60), ("bfloat16", 60), ("uint8", 8 + 32)])
def test_row_bytes(dtype, size):
    assert RowFormat((5, 2, 3), dtype).row_bytes == size
