"""Images transformed on a device against those of the processor's own transform."""

import threading
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from snugfit._data import Batches, Transform
from snugfit._data import device_transform as module
from snugfit._data.device_transform import Placement, transform_on
from snugfit._data.sets import ImageSet
from snugfit._data.transform import CROP_AREA, CROP_RATIO, uniforms
from snugfit.errors import DataError

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


class Pixels(ImageSet):
    """Random images of given sides."""

    def __init__(self, count, height, width):
        generator = torch.Generator().manual_seed(count)
        self.pixels = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)
        self.labels = np.arange(count) % 4

    def images(self, indices):
        return self.pixels[torch.from_numpy(indices)]


@pytest.fixture
def place(device):
    return Placement(device, pinned=device.type != "cpu")


def both(place, transform, images, *, train=True, start=0):
    expected = transform(images, train, (1, 2), start)
    found = transform_on(place, transform, images, train, (1, 2), start)
    assert found.device.type == place.device.type and found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    return expected, found.cpu()


@pytest.mark.parametrize("crop", [True, False])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("erase", [0.0, 0.7])
@pytest.mark.parametrize("size", [(32, 32), (20, 28)])
def test_padded_crops_are_the_same_bits(place, crop, flip, erase, size):
    transform = Transform(MEAN, STD, flip, erase, crop)
    expected, found = both(place, transform, Pixels(40, *size).pixels, start=7)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("size", [(96, 96), (70, 110)])
def test_resized_crops_are_rounded_once_and_near_the_processors(place, size):
    transform, images = Transform((0.0,) * 3, (1.0,) * 3, flip=False), Pixels(24, *size).pixels
    expected, found = (255 * each for each in both(place, transform, images))
    assert (expected - found).abs().max() <= 1.001 and (expected - found).mean().abs() < 0.05
    rectangles = np.stack(module.rectangles(size, uniforms((1, 2), 0, 24)[:, :4], CROP_AREA, CROP_RATIO), axis=1)
    for image, result, (left, top, width, height) in zip(images, found, rectangles, strict=True):
        part = image[None, :, top : top + height, left : left + width].double()
        exact = F.interpolate(part, size, mode="bilinear")[0]
        assert (result - exact).abs().max() <= 0.501


def test_evaluation_only_normalises(place):
    expected, found = both(place, Transform(MEAN, STD, True, 0.5), Pixels(5, 90, 80).pixels, train=False)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("size", [16, 80])
def test_chunks_change_nothing(place, monkeypatch, size):
    transform, images = Transform(MEAN, STD, True, 0.5), Pixels(9, size, size).pixels
    whole = transform_on(place, transform, images, True, 3, 4)
    monkeypatch.setattr(module, "_CHUNK_VALUES", 4 * images[0].numel())
    assert torch.equal(whole, transform_on(place, transform, images, True, 3, 4))
    assert torch.equal(whole[5:], transform_on(place, transform, images[5:], True, 3, 9))


def test_batches_are_those_of_the_host_and_can_stay_there(place):
    batches = Batches(Pixels(20, 12, 12), Transform(MEAN, STD, True), seed=5, augment=True)
    placed = Batches(Pixels(20, 12, 12), Transform(MEAN, STD, True), seed=5, augment=True)
    placed.placement = place
    for epoch in (0, 1):
        for mine, theirs in zip(placed.epoch(epoch, 6, parts=2), batches.epoch(epoch, 6, parts=2), strict=True):
            assert mine[0].device.type == place.device.type
            assert torch.equal(mine[0].cpu(), theirs[0]) and torch.equal(mine[1], theirs[1])
    assert next(placed.on_host().in_order(4))[0].device.type == "cpu" and placed.placement is place


def test_a_thread_reads_the_next_batch_unless_the_callers_code_reads_it(place):
    class Watched(Pixels):
        threads: ClassVar[list[str]] = []

        def images(self, indices):
            self.threads.append(threading.current_thread().name)
            if indices.tolist() == [0]:
                raise DataError("damaged")
            return super().images(indices)

    class Own(Watched):
        threads: ClassVar[list[str]] = []
        runs_own_code = True

    main = threading.current_thread().name
    for kind, others in ((Watched, {"read_0"}), (Own, {main})):
        batches = Batches(kind(12, 8, 8), Transform(MEAN, STD, True), seed=5)
        batches.placement = place
        first = list(batches.epoch(0, 4))
        assert kind.threads[0] == main and set(kind.threads[1:]) == others and len(kind.threads) == 3
        abandoned = batches.epoch(0, 4)
        next(abandoned)
        again = list(batches.epoch(0, 4))
        assert all(torch.equal(one[0], other[0]) for one, other in zip(first, again, strict=True))
    with pytest.raises(DataError, match="damaged"):
        list(batches.epoch(0, 1))
