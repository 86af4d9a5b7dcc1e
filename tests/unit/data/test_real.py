"""Real data sets under SNUGFIT_DATA."""

import os

import numpy as np
import pytest

from snugfit._data import Batches, Transform, load

pytestmark = [pytest.mark.data, pytest.mark.skipif("SNUGFIT_DATA" not in os.environ, reason="SNUGFIT_DATA is not set")]


@pytest.mark.parametrize(
    ("name", "counts", "shape"),
    [("cifar10", (45_000, 5_000, 10_000), (3, 32, 32)), ("mnist", (54_000, 6_000, 10_000), (1, 32, 32))],
)
def test_whole_data_sets(name, counts, shape):
    splits = load(name)
    assert abs(len(splits.train) - counts[0]) <= 10 and len(splits.test) == counts[2]
    assert len(splits.train) + len(splits.val) == counts[0] + counts[1]
    images = splits.train.images(np.arange(0, len(splits.train), 9))
    assert images.shape[1:] == shape
    tolerance = 0.05 if name == "mnist" else 0.01
    assert np.allclose(images.double().mean((0, 2, 3)) / 255, splits.mean, atol=tolerance)
    assert np.allclose(images.double().std((0, 2, 3)) / 255, splits.std, atol=tolerance)


def test_flower_photos():
    splits = load("folder:flower_photos", image_size=64)
    assert splits.class_names == ("daisy", "dandelion", "roses", "sunflowers", "tulips")
    assert (len(splits.train), len(splits.val), len(splits.test)) == (900, 100, 250)
    batches = Batches(splits.val, Transform(splits.mean, splits.std, splits.flip))
    images = [images for images, _ in batches.in_order(50)]
    assert [part.shape for part in images] == [(50, 3, 64, 64)] * 2
    assert all(abs(float(part.mean())) < 1 and 0.5 < float(part.std()) < 1.6 for part in images)
    splits.close()
