"""Notices about the number of training images of each class, by hand."""

import numpy as np
import pytest

from snugfit._data.class_counts import class_notes

NAMES = ("cat", "dog", "eel")


def labels(*counts):
    return np.repeat(np.arange(len(counts)), counts)


@pytest.mark.parametrize("counts", [(20, 20, 20), (100, 50, 20), (20, 100, 30)])
def test_enough_and_balanced_images_need_no_notice(counts):
    assert class_notes(labels(*counts), NAMES, pretrained=True) == []
    assert class_notes(labels(*(5 * count for count in counts)), NAMES) == []


def test_random_weights_need_more_images():
    (few,) = class_notes(labels(60, 99, 100), NAMES)
    assert few.startswith(
        "2 of 3 classes have fewer than 100 training images, 'cat' has 60; with pre-trained --weights"
    )
    assert class_notes(labels(60, 99, 100), NAMES, pretrained=True) == []


def test_few_images_and_unbalanced_classes_are_two_notices():
    few, unbalanced = class_notes(labels(96, 19, 12), NAMES, pretrained=True)
    assert few == "2 of 3 classes have fewer than 20 training images, 'eel' has 12"
    assert unbalanced.startswith("classes are unbalanced: 'cat' has 96 training images, 'eel' has 12")
    assert class_notes(labels(96, 19, 12), NAMES, weighted=True, pretrained=True) == [few]
    assert len(class_notes(labels(30, 30), NAMES, pretrained=True)) == 1, "eels have no image, which no weight helps"
    (alone,) = class_notes(labels(101, 20, 20), NAMES, pretrained=True)
    assert alone.startswith("classes are unbalanced")
