"""Normalisation and augmentation against slow, obvious versions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from snugfit._data import Transform
from snugfit._data import transform as module
from snugfit.errors import DataError


def random_images(count, channels=3, size=32):
    return torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8)


def identity(channels=3, size=32, flip=True, erase=0.0):
    return Transform((0.0,) * channels, (1.0,) * channels, flip, erase)


def test_evaluation_only_normalises():
    images = random_images(7)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    got = Transform(mean, std, True)(images)
    want = (images.double() / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    assert got.dtype == torch.float32 and got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flip", [False, True])
def test_every_augmented_image_is_a_shifted_or_mirrored_original(flip):
    images = random_images(24, channels=1, size=12)
    got = (identity(1, 12, flip)(images, train=True, seed=3) * 255).round().to(torch.uint8)
    mirrored = 0
    for image, result in zip(images, got, strict=True):
        padded = F.pad(image, (4,) * 4)
        windows = [padded[:, y : y + 12, x : x + 12] for y in range(9) for x in range(9)]
        plain = any(torch.equal(result, window) for window in windows)
        mirror = any(torch.equal(result, window.flip(-1)) for window in windows)
        assert plain or (flip and mirror)
        mirrored += mirror and not plain
    assert (mirrored > 0) is flip


def bilinear(part, size):
    """The image (C, H, W) at size x size in float64: pixels are squares, and samples lie at their centres."""
    channels, rows, columns = part.shape
    found = np.zeros((channels, size, size))
    for y in range(size):
        for x in range(size):
            at = [max((i + 0.5) * n / size - 0.5, 0) for i, n in ((y, rows), (x, columns))]
            low = [int(place) for place in at]
            high = [min(place + 1, n - 1) for place, n in zip(low, (rows, columns), strict=True)]
            down, right = (place - int(place) for place in at)
            upper = part[:, low[0], low[1]] * (1 - right) + part[:, low[0], high[1]] * right
            lower = part[:, high[0], low[1]] * (1 - right) + part[:, high[0], high[1]] * right
            found[:, y, x] = upper * (1 - down) + lower * down
    return found


def test_a_cut_is_resized_bilinearly():
    images = random_images(5, size=20)
    left, top, width, height = (
        np.array(each) for each in ((0, 3, 7, 0, 19), (0, 8, 2, 5, 0), (20, 5, 9, 7, 1), (20, 12, 9, 3, 20))
    )
    got = module.cut(images, left, top, width, height, 9)
    assert got.dtype == torch.uint8 and torch.equal(got[2], images[2, :, 2:11, 7:16])
    for i in range(5):
        part = images[i, :, top[i] : top[i] + height[i], left[i] : left[i] + width[i]].double().numpy()
        error = np.abs(got[i].double().numpy() - bilinear(part, 9)).max()
        assert error.round(9) <= 1, "half a level for each of two passes; the error itself is rounded in float64"


def test_resized_crop_keeps_a_linear_image_linear():
    ramp = torch.arange(96, dtype=torch.uint8).expand(1, 96, 96)[None].repeat(16, 1, 1, 1)
    original = ramp.clone()
    got = identity(1, 96, flip=False)(ramp, train=True, seed=5) * 255
    steps = got[:, 0].diff(dim=-1)
    slopes = (got[:, 0, :, -1] - got[:, 0, :, 0]) / 95
    assert (slopes > 0.4).all() and (slopes <= 1.001).all() and slopes.unique().numel() > 4
    assert (steps >= -0.01).all() and (steps <= 2.01).all()
    assert torch.equal(ramp, original)


@pytest.mark.parametrize("size", [32, 80])
def test_one_image_is_never_changed_in_place(size):
    images = random_images(1, size=size)
    before = images.clone()
    for seed in range(20):
        identity(3, size)(images, train=True, seed=seed)
    assert torch.equal(images, before)


@pytest.mark.parametrize("size", [16, 80])
@pytest.mark.parametrize("chunk", [1, 1 << 14, 1 << 24])
def test_augmentation_depends_on_position_not_on_batch(size, chunk, monkeypatch):
    images, transform = random_images(20, size=size), identity(3, size, erase=0.5)
    whole = transform(images, train=True, seed=(1, 2))
    monkeypatch.setattr(module, "_CHUNK_VALUES", chunk)
    pieces = [transform(images[a:b], train=True, seed=(1, 2), start=a) for a, b in ((0, 3), (3, 4), (4, 20))]
    assert torch.equal(whole, torch.cat(pieces))
    assert not torch.equal(whole, transform(images, train=True, seed=(1, 3)))


def test_global_generators_are_neither_used_nor_moved():
    images, transform = random_images(8), identity(erase=1.0)
    torch.manual_seed(1)
    np.random.seed(1)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = transform(images, train=True, seed=9)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    torch.manual_seed(2)
    assert torch.equal(first, transform(images, train=True, seed=9))


def test_erasing_sets_a_rectangle_to_the_mean():
    images = torch.full((64, 3, 32, 32), 255, dtype=torch.uint8)
    images = torch.nn.functional.pad(images, (0, 0, 0, 0))
    got = Transform((0.5,) * 3, (0.5,) * 3, False, 0.5)(images, train=True, seed=0)
    plain = Transform((0.5,) * 3, (0.5,) * 3, False)(images, train=True, seed=0)
    erased = 0
    for image, reference in zip(got, plain, strict=True):
        changed = (image != reference).all(0)
        assert (image[:, changed] == 0).all()
        assert torch.equal(image[:, ~changed], reference[:, ~changed])
        erased += bool(changed.any())
    assert 16 < erased < 48
    share = (got != plain).float().mean() / (erased / 64)
    assert 0.02 < share < 0.33


def test_uniforms_are_uniform():
    draws = module.uniforms(7, 0, 4000)
    assert draws.shape == (4000, 12)
    assert np.allclose(draws.mean(0), 0.5, atol=0.03) and np.allclose(draws.var(0), 1 / 12, atol=0.01)
    assert np.abs(np.corrcoef(draws.T) - np.eye(12)).max() < 0.08


def test_wrong_channel_count():
    with pytest.raises(DataError, match=r"1 channel\(s\), not 3"):
        identity(3)(random_images(2, channels=1))
