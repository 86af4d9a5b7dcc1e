"""Order, resumption and views of batches."""

import numpy as np
import pytest
import torch

from snugfit._data import Batches, Transform
from snugfit.errors import UsageError


class Counted:
    """An image set whose image i is filled with the value i."""

    def __init__(self, count):
        self.labels = np.arange(count, dtype=np.int64) * 3

    def __len__(self):
        return len(self.labels)

    def images(self, indices):
        return torch.from_numpy(indices.astype(np.uint8)).view(-1, 1, 1, 1).repeat(1, 1, 8, 8)


def batches(count=23, augment=True, seed=0):
    return Batches(Counted(count), Transform((0.0,), (1.0,), True), seed=seed, augment=augment)


def values(images):
    return (images[:, 0, 4, 4] * 255).round().long()


def test_epoch_shows_each_image_at_most_once_with_its_label():
    images, labels = zip(*batches(augment=False).epoch(0, 5), strict=True)
    seen = values(torch.cat(images))
    assert len(images) == batches().steps(5) == 4
    assert len(seen) == len(set(seen.tolist())) == 20
    assert torch.equal(torch.cat(labels), seen * 3)


def test_small_set_gives_one_batch():
    assert batches(3).steps(128) == 1
    ((images, labels),) = batches(3).epoch(0, 128)
    assert len(images) == 3 and sorted(labels.tolist()) == [0, 3, 6]


@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_resumed_epoch_equals_the_uninterrupted_one(start):
    whole = list(batches().epoch(2, 5))[start:]
    resumed = list(batches().epoch(2, 5, start))
    assert len(whole) == len(resumed) == 4 - start
    for (images, labels), (other, other_labels) in zip(whole, resumed, strict=True):
        assert torch.equal(images, other) and torch.equal(labels, other_labels)


@pytest.mark.parametrize("parts", [2, 3, 4, 10])
def test_parts_of_batches_have_their_images_in_the_same_augmentation(parts):
    """Of 23 images, batches of 10 from the second on."""
    (whole, labels), found = next(batches().epoch(1, 10, 1)), list(batches().epoch(1, 10, 1, parts))
    assert [len(images) for images, _ in found] == [len(part) for part in np.array_split(range(10), parts)]
    assert torch.equal(torch.cat([images for images, _ in found]), whole)
    assert torch.equal(torch.cat([some for _, some in found]), labels)


def test_epochs_and_seeds_differ():
    first = torch.cat([labels for _, labels in batches().epoch(0, 5)])
    assert not torch.equal(first, torch.cat([labels for _, labels in batches().epoch(1, 5)]))
    assert not torch.equal(first, torch.cat([labels for _, labels in batches(seed=1).epoch(0, 5)]))


def test_in_order_shows_everything_once_without_augmentation():
    images, labels = zip(*batches().in_order(5), strict=True)
    assert [len(part) for part in labels] == [5, 5, 5, 5, 3]
    assert torch.equal(torch.cat(labels), torch.arange(23) * 3)
    assert (torch.cat(images) * 255).round().long().eq(torch.arange(23).view(-1, 1, 1, 1)).all()


def test_views_are_augmented_repeatable_and_independent_of_batch_size():
    def view(number, batch_size):
        return torch.cat([images for images, _ in batches(augment=True).in_order(batch_size, number)])

    assert torch.equal(view(1, 5), view(1, 23))
    assert not torch.equal(view(1, 5), view(2, 5))
    assert not torch.equal(view(0, 5), torch.cat([images for images, _ in batches().in_order(5)]))
    plain = [torch.cat([images for images, _ in batches(augment=False).in_order(5, view)]) for view in (None, 1, 2)]
    assert torch.equal(plain[0], plain[1]) and torch.equal(plain[0], plain[2]), "nothing was asked for"


def test_bad_numbers():
    with pytest.raises(UsageError, match="batch size"):
        next(batches().epoch(0, 0))
