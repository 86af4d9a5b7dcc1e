"""Units divided before the pools and dropouts that end them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain, split_tail


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3), nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)) * self.scale, 2)
        return self.head(F.relu(self.second(x)).mean((2, 3)))


def layered():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5),
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip


@pytest.mark.parametrize("make", [Functional, layered])
def test_body_and_tail_compute_what_the_unit_does(make):
    unit = Chain.from_module(make(), (3, 8, 8)).units[0]
    unit.module.eval()
    body, tail = split_tail(unit.module)
    images = torch.randn(2, 3, 8, 8)
    assert body(images).shape[1:] == unit.map_shape == (4, 8, 8)
    assert unit.output_shape == (4, 4, 4)
    assert torch.equal(tail(body(images)), unit.module(images))
    assert not list(tail.parameters())


@pytest.mark.parametrize("make", [Functional, layered])
def test_layers_are_the_units_own(make):
    unit = Chain.from_module(make(), (3, 8, 8)).units[0]
    body, _ = split_tail(unit.module)
    assert {id(p) for p in body.parameters()} == {id(p) for p in unit.module.parameters()}
    assert list(body.state_dict()) == list(unit.module.state_dict())


def test_dropout_in_the_tail_follows_the_units_mode():
    unit = Chain.from_module(layered(), (3, 8, 8)).units[0]
    _, tail = split_tail(unit.module)
    features = torch.ones(1, 4, 8, 8)
    unit.module.train()
    assert (tail(features) == 0).any()
    unit.module.eval()
    assert torch.equal(tail(features), torch.ones(1, 4, 4, 4))


def test_a_unit_without_a_tail_is_its_own_body():
    unit = Chain.from_module(layered(), (3, 8, 8)).units[1]
    body, tail = split_tail(unit.module)
    assert body is unit.module and isinstance(tail, nn.Identity)
    assert unit.map_shape == unit.output_shape


def test_a_pool_that_is_not_all_there_is_stays():
    """The pooled map is added to another: what crosses is not the pool's value."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 5)

        def forward(self, x):
            y = self.conv(x)
            z = F.max_pool2d(y, 2) + F.avg_pool2d(y, 2)
            return self.head(F.relu(z).mean((2, 3)))

    body, tail = split_tail(Chain.from_module(Sum(), (3, 8, 8)).units[0].module)
    assert isinstance(tail, nn.Identity)
    assert body(torch.randn(1, 3, 8, 8)).shape == (1, 4, 4, 4)
