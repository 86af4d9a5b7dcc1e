"""A user's own data sets."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from snugfit.data import from_dataset
from snugfit.errors import DataError


class Listed(Dataset):
    """A list of (image, label), which counts how often it is read."""

    def __init__(self, items, **attributes):
        self.items, self.reads = items, 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.reads += 1
        return self.items[index]


def items(count=20, shape=(3, 8, 8)):
    return [(torch.full(shape, i / 255), i % 2) for i in range(count)]


def test_float_images_become_bytes():
    splits = from_dataset(Listed(items()), val=Listed(items()), test=Listed(items(7)))
    assert splits.image_shape == (3, 8, 8) and splits.mean == (0.5, 0.5, 0.5) and splits.class_names == ("0", "1")
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [20, 20, 7]
    got = splits.train.images(np.array([5, 2]))
    assert got.dtype == torch.uint8 and got[:, 0, 0, 0].tolist() == [5, 2]


def test_missing_parts_are_split_off():
    splits = from_dataset(Listed(items(40)), class_names=("even", "odd"))
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [32, 4, 4]
    for part in (splits.train, splits.val, splits.test):
        assert np.array_equal(part.images(np.arange(len(part)))[:, 0, 0, 0].numpy(), part.indices)
        assert np.array_equal(part.labels, part.indices % 2)


def test_labels_are_taken_without_reading_images():
    data = Listed(items(), targets=[i % 2 for i in range(20)])
    from_dataset(data)
    assert data.reads == 1
    images, labels = torch.zeros(20, 1, 8, 8, dtype=torch.uint8), torch.arange(20) % 4
    splits = from_dataset(Subset(TensorDataset(images, labels), [4, 5, 6, 7]), TensorDataset(images, labels))
    assert splits.train.labels.tolist() == [0, 1, 2, 3]


def test_transformed_targets_are_not_taken_from_the_attribute():
    data = Listed(items(), targets=[9] * 20, target_transform=lambda label: label)
    assert set(from_dataset(data).train.labels) == {0, 1}


def test_pil_images():
    photos = [(Image.new("RGB", (20, 12), (i, 0, 0)), i % 2) for i in range(20)]
    splits = from_dataset(Listed(photos), val=Listed(photos))
    assert splits.image_shape == (3, 12, 12)
    assert splits.train.images(np.arange(20))[:, 0].float().mean((1, 2)).tolist() == list(range(20))
    grey = [(photo.convert("L"), label) for photo, label in photos]
    assert from_dataset(Listed(grey), image_size=6).image_shape == (1, 6, 6)


def test_image_size_resizes_tensors():
    splits = from_dataset(Listed(items(shape=(1, 10, 6))), image_size=4)
    assert splits.train.images(np.arange(3)).shape == (3, 1, 4, 4)


def broken(index, item):
    data = items()
    data[index] = item
    return Listed(data, targets=[i % 2 for i in range(20)])


class Unreadable:
    def __iter__(self):
        raise OSError("disk on fire")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((torch.zeros(1, 8, 8), 0), r"image 3 has 1 channel\(s\), but the first has 3"),
        ((torch.zeros(3, 9, 8), 0), r"image 3 is \(9, 8\) pixels"),
        ((torch.zeros(8, 8, 3), 0), r"image 3 has shape \(8, 8, 3\)"),
        ((torch.full((3, 8, 8), -1.5), 0), r"image 3 is neither uint8 nor float in \[0, 1\]"),
        ((torch.full((3, 8, 8), float("nan")), 0), r"image 3 is neither"),
        ((torch.zeros(3, 8, 8, dtype=torch.int64), 0), r"image 3 is neither"),
        (("photo", 0), r"image 3 is a str"),
        ((Image.new("L", (8, 8)), 0), r"image 3 has mode L"),
        (torch.zeros(3, 8, 8), r"item 3 of the data set is not a pair"),
    ],
)
def test_bad_image_is_named(item, message):
    splits = from_dataset(broken(3, item), val=Listed(items()))
    with pytest.raises(DataError, match=message):
        splits.train.images(np.arange(5))


def test_unreadable_item_is_named():
    class Failing(Listed):
        def __getitem__(self, index):
            if index == 4:
                raise OSError("truncated")
            return super().__getitem__(index)

    with pytest.raises(DataError, match="image 4 of the data set cannot be read: truncated"):
        from_dataset(Failing(items()))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Listed([]), {}, "train data set is empty"),
        (Listed([(torch.zeros(3, 8, 8), 0.5)] * 4), {}, "not one integer per image"),
        (Listed([(torch.zeros(3, 8, 8), 0)] * 4), {}, "only one class"),
        (Listed(items()), {"class_names": ("a", "b"), "val": Listed([(torch.zeros(3, 8, 8), 2)])}, "has label 2"),
        (Listed([(torch.zeros(3, 8, 8), -1), (torch.zeros(3, 8, 8), 3)]), {}, "has label -1"),
        (Listed(items(shape=(3, 8, 6))), {}, "must be square"),
        (Listed(items()), {"classes": 5}, "has 2 classes, not 5"),
    ],
)
def test_bad_data_set(data, options, message):
    with pytest.raises(DataError, match=message):
        from_dataset(data, **options)


def test_labels_that_ask_for_too_many_classes_are_refused():
    images = TensorDataset(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 0, 3_000_000_000]))
    with pytest.raises(DataError, match="3,000,000,001 classes are more than 100,000"):
        from_dataset(images)
