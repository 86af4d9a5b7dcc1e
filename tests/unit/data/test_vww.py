"""Visual Wake Words, from COCO files written small: labels and division."""

import numpy as np
import pytest
from tiny_coco import TRAIN, VAL, ids

from snugfit._data import load


def places(part):
    """Where the images of a set stand in TRAIN or VAL, told from their colour."""
    return (part.images(np.arange(len(part))).double().mean((1, 2, 3)) / 20).round().int().tolist()


def every_label(splits):
    pairs = [*zip(places(splits.train), splits.train.labels, strict=True)]
    return sorted(pairs + [*zip(places(splits.val), splits.val.labels, strict=True)])


@pytest.mark.parametrize("year", [2014, 2017])
def test_labels_and_parts(write_coco, year):
    splits = load("vww", data_dir=write_coco(year).parent)
    assert splits.class_names == ("no person", "person") and splits.image_shape == (3, 128, 128) and splits.flip
    assert every_label(splits) == [(place, image[-1]) for place, image in enumerate(TRAIN)]
    assert places(splits.test) == [0, 1, 2, 3] and splits.test.labels.tolist() == [image[-1] for image in VAL]
    assert splits.test.labels.dtype == np.int64
    splits.close()


def test_listed_images_of_both_parts_are_the_test_part(write_coco):
    root = write_coco()
    (root / "annotations" / "mscoco_minival_ids.txt").write_text(ids("val", 3, 0) + "\n" + ids("train", 6))
    splits = load("vww", data_dir=root)
    assert places(splits.test) == [6, 0, 3] and splits.test.labels.tolist() == [0, 1, 1]
    want = [(place, image[-1]) for place, image in enumerate(TRAIN) if place != 6] + [(1, 0), (2, 0)]
    assert every_label(splits) == sorted(want)


def test_release_of_2014_comes_first_and_half_a_release_is_passed_over(write_coco):
    root = write_coco(2017)
    write_coco(2014)
    assert "2014" in str(load("vww", data_dir=root).test.parent.files[0])
    (root / "annotations" / "instances_val2014.json").unlink()
    assert "2017" in str(load("vww", data_dir=root).test.parent.files[0])


def test_order_and_layout_of_the_file_do_not_matter(write_coco):
    root = write_coco(indent=2, sort_keys=True)  # annotations and categories before images
    assert every_label(load("vww", data_dir=root)) == [(place, image[-1]) for place, image in enumerate(TRAIN)]
