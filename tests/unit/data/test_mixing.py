"""Mixup and CutMix: torchvision's formulas, the same in micro-batches and when resumed, shares by the papers."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from snugfit._data import Batches, Transform
from snugfit._data.transform import Mix, Mixing

CLASSES = 5
BOTH = {"mixup": 0.4, "cutmix": 1.0}
each_kind = pytest.mark.parametrize("kinds", [{"mixup": 0.4}, {"cutmix": 1.0}, BOTH], ids="+".join)


class Noise:
    """Image i is noise of its own; labels are random."""

    def __init__(self, count):
        self.pixels = torch.randint(256, (count, 2, 8, 12), generator=torch.Generator().manual_seed(0)).byte()
        self.labels = np.random.default_rng(0).integers(CLASSES, size=count)

    def __len__(self):
        return len(self.labels)

    def images(self, indices):
        return self.pixels[torch.from_numpy(indices)]


def batches(count=23, kinds=BOTH, augment=True, seed=0):
    made = Batches(Noise(count), Transform((0.0,) * 2, (1.0,) * 2, True, crop=False), seed=seed, augment=augment)
    made.mixing = Mixing(CLASSES, **kinds) if kinds else None
    return made


def by_torchvision(images, labels, mix):
    """``torchvision.transforms.v2``: MixUp and CutMix with one share for the batch, (B, C, H, W) and (B,)."""
    targets = F.one_hot(labels, CLASSES).float()
    partners = images.roll(1, 0)
    if mix.box is None:
        output = partners.mul(1.0 - mix.share).add(images.mul(mix.share))
    else:
        top, bottom, left, right = mix.box
        output = images.clone()
        output[..., top:bottom, left:right] = partners[..., top:bottom, left:right]
    return output, targets.roll(1, 0).mul(1.0 - mix.share).add(targets.mul(mix.share))


@each_kind
@pytest.mark.parametrize("count", [23, 1, 2])
def test_a_step_is_mixed_as_by_torchvision(kinds, count):
    plain, mixed = batches(count, kinds=None), batches(count, kinds)
    for step, ((images, labels), found) in enumerate(zip(plain.epoch(3, 5), mixed.epoch(3, 5), strict=True)):
        mix = mixed.mixing.draw((0, 3, 3, step), 8, 12)
        for one, other in zip(found, by_torchvision(images, labels, mix), strict=True):
            torch.testing.assert_close(one, other)
        assert found[1].dtype == torch.float32 and found[0].is_contiguous(memory_format=torch.channels_last)


@each_kind
@pytest.mark.parametrize("parts", [2, 3, 4, 10])
def test_micro_batches_of_a_step_are_mixed_as_the_whole_batch(kinds, parts):
    made = batches(kinds=kinds)
    (whole, targets), found = next(made.epoch(1, 10, 1)), list(made.epoch(1, 10, 1, parts))
    assert len(found) == parts
    assert torch.equal(torch.cat([images for images, _ in found]), whole)
    assert torch.equal(torch.cat([some for _, some in found]), targets)


def test_a_resumed_epoch_is_mixed_as_the_uninterrupted_one():
    whole, resumed = list(batches().epoch(2, 5))[2:], list(batches().epoch(2, 5, 2))
    for pair, other in zip(whole, resumed, strict=True):
        assert all(map(torch.equal, pair, other))


def test_steps_epochs_and_seeds_draw_shares_of_their_own():
    def shares(seed, epoch):
        made = batches(kinds={"mixup": 4.0}, seed=seed)
        return [targets.amax(1).min().item() for _, targets in made.epoch(epoch, 5)]

    drawn = shares(0, 0) + shares(0, 1) + shares(1, 0)
    assert len(set(drawn)) == len(drawn) == 12


def test_only_training_is_mixed():
    mixed, plain = batches(), batches(kinds=None)
    for pair, other in zip(mixed.in_order(5), plain.in_order(5), strict=True):
        assert all(map(torch.equal, pair, other))


def test_an_epoch_can_be_had_without_mixing():
    for pair, other in zip(batches().epoch(2, 5, mixed=False), batches(kinds=None).epoch(2, 5), strict=True):
        assert all(map(torch.equal, pair, other))


def test_targets_are_probabilities_of_both_images():
    found = Mix(0.75).targets(torch.tensor([1, 1, 4]), torch.tensor([2]), CLASSES)
    assert found.tolist() == [[0, 0.75, 0.25, 0, 0], [0, 1, 0, 0, 0], [0, 0.25, 0, 0, 0.75]]


def test_targets_of_several_labels_are_mixed_like_images():
    labels = torch.tensor([[1.0, 0, 1], [0, 0, 1]])
    found = Mix(0.75).targets(labels, torch.tensor([[0.0, 1, 1]]), 3)
    assert found.tolist() == [[0.75, 0.25, 1], [0.25, 0, 1]] and labels.tolist() == [[1, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_are_of_the_beta_distribution(alpha):
    """Its mean is 1/2 and its variance 1 / (4 (2 alpha + 1))."""
    shares = np.array([Mixing(2, mixup=alpha).draw((seed,), 4, 4).share for seed in range(2000)])
    assert abs(shares.mean() - 0.5) < 0.04
    assert abs(shares.var() * 4 * (2 * alpha + 1) - 1) < 0.15


def test_a_box_has_the_area_of_its_share_and_lies_within_the_image():
    whole = 0
    for seed in range(500):
        mix = Mixing(2, cutmix=1.0).draw((seed,), 30, 50)
        top, bottom, left, right = mix.box
        assert 0 <= top <= bottom <= 30 and 0 <= left <= right <= 50
        assert mix.share == pytest.approx(1 - (bottom - top) * (right - left) / 1500)
        whole += bottom > top and right > left
    assert whole > 400


def test_two_kinds_take_turns_at_random():
    kinds = [Mixing(2, 0.2, 1.0).draw((seed,), 8, 8).box is None for seed in range(400)]
    assert 150 < sum(kinds) < 250
