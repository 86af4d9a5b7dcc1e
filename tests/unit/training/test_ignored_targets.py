"""Targets that a loss leaves out, whether it shows them or not."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._training.ignored_targets import IgnoredTargets

LIKE = torch.zeros(())
LABELS, SOME = torch.tensor([0, 1, 2, 1]), torch.tensor([0, -100, 2, 1])


class Wrapped(nn.Module):
    def __init__(self, ignored):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(ignore_index=ignored)

    def forward(self, outputs, targets):
        return self.inner(outputs, targets)


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (F.cross_entropy, -100), (nn.CrossEntropyLoss(), -100), (partial(F.cross_entropy, ignore_index=255), 255),
        (lambda outputs, targets: 2 * F.cross_entropy(outputs, targets), -100),
        (lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=255), 255),
        (Wrapped(255), 255),
    ],
)  # fmt: skip
def test_an_ignored_target_is_found_however_the_loss_is_written(loss, ignored):
    found = IgnoredTargets(loss, (3,), LIKE)
    assert found.among(LABELS) is None
    assert found.among(LABELS.index_fill(0, torch.tensor(1), ignored)) == ignored
    assert found.among(LABELS) is None


def test_ignored_pixels_are_found_in_every_image():
    maps = torch.arange(4 * 6 * 6).view(4, 6, 6) % 3
    maps[0, 0], maps[1, :2], maps[2, 0, 0], maps[3, :3] = 255, 255, 255, 255
    assert IgnoredTargets(Wrapped(255), (3, 6, 6), LIKE).among(maps) == 255


def test_numbers_that_are_no_classes_are_not_ignored():
    tries = []

    def counted(outputs, targets):
        tries.append(len(targets))
        return F.mse_loss(outputs[:, 0], targets.float())

    found = IgnoredTargets(counted, (3,), LIKE)
    assert found.among(torch.tensor([7, 7, 1, 0])) is None and tries
    tries.clear()
    assert found.among(torch.tensor([9, 9, 1, 0])) is None and not tries, "it is tried once"
    assert IgnoredTargets(counted, (3,), LIKE).among(torch.tensor([7.0, -2])) is None and not tries
    assert IgnoredTargets(counted, (3,), LIKE).among(torch.tensor([7, 9, 1])) is None and not tries, "one is ignored"


def test_outputs_without_classes_have_no_ignored_targets():
    found = IgnoredTargets(lambda outputs, targets: F.mse_loss(outputs, targets.float()), (), LIKE)
    assert found.among(torch.tensor([0, 5, 1])) is None
    tokens = IgnoredTargets(
        lambda outputs, targets: F.cross_entropy(outputs.flatten(0, 1), targets.flatten()), (4, 9), LIKE
    )
    assert tokens.among(torch.tensor([[8, -100, 2, 3], [1, 2, 7, 8]])) is None, "its classes are the last axis"


def test_images_that_ignore_alike_decide_nothing():
    """Their means weigh all images alike; the next ones may not."""
    found, maps = IgnoredTargets(Wrapped(255), (3, 4, 4), LIKE), torch.arange(64).view(4, 4, 4) % 3
    alike, unlike = maps.clone(), maps.clone()
    alike[:, 0], unlike[0, :3], unlike[1, 0] = 255, 255, 255
    assert found.among(alike) is None and found.among(unlike) == 255 == found.among(alike)
