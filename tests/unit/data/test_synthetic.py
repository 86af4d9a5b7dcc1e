"""Splits of synthetic images, of which only the shape is given."""

import numpy as np
import pytest
import torch

from snugfit._core.option_groups import DataOptions
from snugfit._data.synthetic import TRAIN_COUNT, synthetic_splits
from snugfit.errors import DataError


def counts(**options):
    splits = synthetic_splits(DataOptions(input_shape="3x8x8", classes=4, **options))
    return [len(part) for part in (splits.train, splits.val, splits.test)]


def test_counts_are_the_limits_or_the_documented_defaults():
    assert counts() == [TRAIN_COUNT, TRAIN_COUNT // 10, TRAIN_COUNT // 10]
    assert counts(max_train=50) == [50, 5, 5]
    assert counts(max_train=3) == [3, 1, 1]
    assert counts(max_train=7, max_val=2) == [7, 2, 2]


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_images_are_made_when_they_are_read(channels):
    splits = synthetic_splits(DataOptions(input_shape=(channels, 9, 9), classes=4, max_train=10**6))
    assert splits.image_shape == (channels, 9, 9) and len(splits.mean) == len(splits.std) == channels
    stored = [value for value in vars(splits.train).values() if hasattr(value, "nbytes")]
    assert sum(value.nbytes for value in stored) == 8 * 10**6, "labels alone"
    indices = np.array([999_999, 4])
    images = splits.train.images(indices)
    assert (tuple(images.shape), images.dtype) == ((2, channels, 9, 9), torch.uint8)
    assert torch.equal(images, splits.train.images(indices))
    assert len(images.unique()) > 20, "no constant, which batch norms would divide by nothing"


def test_classes_have_equally_many_images():
    splits = synthetic_splits(DataOptions(input_shape="1x8x8", classes=3, max_train=11))
    assert np.bincount(splits.train.labels).tolist() == [4, 4, 3]
    assert splits.class_names == ("0", "1", "2")


def test_more_classes_than_any_classifier_has():
    with pytest.raises(DataError, match="100,000"):
        synthetic_splits(DataOptions(input_shape="1x8x8", classes=10**9))
