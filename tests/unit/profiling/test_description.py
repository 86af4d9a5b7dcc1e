"""Descriptions are equal for modules that take the same, and for no others."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

from snugfit._chain import Chain
from snugfit.profiling import describe


def conv(*arguments, **options):
    return nn.Sequential(nn.Conv2d(*arguments, **options), nn.ReLU())


def test_names_and_weights_do_not_matter():
    chain = Chain.from_module(
        nn.Sequential(conv(3, 3, 3, padding=1), conv(3, 3, 3, padding=1), nn.Flatten(), nn.Linear(192, 2)), (3, 8, 8)
    )
    first, second, *_ = (unit.module for unit in chain.all_units)
    torch.manual_seed(0)
    assert describe(first) == describe(second)


BASE = {"in_channels": 3, "out_channels": 4, "kernel_size": 3, "padding": 1}


@pytest.mark.parametrize(
    "changed",
    [
        {"out_channels": 5}, {"kernel_size": 5}, {"padding": 2}, {"stride": 2}, {"dilation": 2}, {"bias": False},
        {"dtype": torch.float64}, {"padding_mode": "circular"},
    ],
)  # fmt: skip
def test_settings_matter(changed):
    assert describe(nn.Conv2d(**BASE)) != describe(nn.Conv2d(**{**BASE, **changed}))


def test_what_trains_matters():
    frozen = nn.Conv2d(**BASE).requires_grad_(False)
    assert describe(nn.Conv2d(**BASE)) != describe(frozen)


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.conv, self.factor = nn.Conv2d(**BASE), factor

    def forward(self, images):
        return self.conv(images) * self.factor


def test_functions_between_layers_and_their_numbers_matter():
    def traced(factor):
        return describe(torch.fx.symbolic_trace(Scaled(factor)))

    assert traced(2) == traced(2) != traced(3)


def test_the_file_of_a_users_class_and_its_settings_matter():
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    assert digest in describe(Scaled(2))
    assert digest not in describe(nn.Conv2d(**BASE))
    assert describe(Scaled(2)) != describe(Scaled(3))


def test_hooks_matter():
    made = Scaled(2)
    made.conv.register_forward_hook(lambda layer, given, output: output * 2)
    assert "hook test_hooks_matter.<locals>.<lambda>" in describe(made)


def test_shared_weights_matter():
    apart = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared[1].weight = shared[0].weight
    assert describe(apart) != describe(shared)
