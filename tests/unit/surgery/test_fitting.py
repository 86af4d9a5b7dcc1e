"""Widths of real networks that fit a target or a bound, against trying and profiling."""

from itertools import product

import pytest
import torch
from memory_rule import profile_by

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.errors import ModelError, UsageError
from snugfit.surgery import (
    best_widths,
    blocks_of,
    hidden_groups,
    narrowed_meta_copy,
    sensitive_blocks,
    width,
    widths_for,
)


def on_meta(name, size):
    with torch.device("meta"):
        model = models.build(name, 10, size)
    return Chain.from_module(model, (3, size, size)).to_module()


def all_groups(module, shape):
    return [group for found in hidden_groups(module, shape).values() for group in found]


def temporary(profile, module):
    return [block.temporary_bytes for block in profile(module).blocks]


def test_mobilenets_first_blocks_come_to_the_papers_target():
    """The paper's figures: from 5.6 MB at block 2, 21 of 96 channels bring 1.9 MB, its ratio of 0.78."""
    shape = (3, 224, 224)
    module, profile = on_meta("mobilenet_v2", 224), profile_by(shape)
    target = 1_900_000
    assert temporary(profile, module)[2] == 5_619_712
    assert {1, 2, 3, 4} <= set(sensitive_blocks(temporary(profile, module), target))
    found = widths_for(module, shape, profile, target)
    assert max(temporary(profile, narrowed_meta_copy(module, all_groups(module, shape), found))) <= target
    assert list(found.values()) == [21, 21, 127, 127]


@pytest.mark.parametrize(("name", "share"), [("vgg16", 0.6), ("mobilenet_v1", 0.6), ("resnet18", 0.75)])
def test_other_families_come_to_a_target(name, share):
    shape = (3, 64, 64)
    module, profile = on_meta(name, 64), profile_by(shape)
    most = max(temporary(profile, module))
    found = widths_for(module, shape, profile, int(share * most))
    assert found
    assert max(temporary(profile, narrowed_meta_copy(module, all_groups(module, shape), found))) <= share * most


def test_blocks_that_cannot_shrink_may_be_left_out():
    """A bottleneck's projection shortcut reads and makes what must stay; the blocks behind it have none."""
    shape = (3, 64, 64)
    module, profile = on_meta("resnet50", 64), profile_by(shape)
    target = 4 * 256 * 290
    with pytest.raises(ModelError):
        widths_for(module, shape, profile, target)
    found = widths_for(module, shape, profile, target, blocks=[2, 3])
    assert found == {f"layer1.{block}.conv{at}": 34 for block in (1, 2) for at in (1, 2)}
    left = temporary(profile, narrowed_meta_copy(module, all_groups(module, shape), found))
    assert max(left[2:4]) <= target < left[1]


def test_a_target_that_no_pruning_reaches_is_an_error():
    shape = (3, 64, 64)
    module, profile = on_meta("resnet18", 64), profile_by(shape)
    with pytest.raises(ModelError, match="block 0 needs"):
        widths_for(module, shape, profile, 1000)


class Small(torch.nn.Sequential):
    """A plain stack, in which the width that a block makes is what the next one reads."""

    def __init__(self):
        conv, relu, nn = torch.nn.Conv2d, torch.nn.ReLU, torch.nn
        super().__init__(
            conv(3, 8, 3, padding=1), relu(), conv(8, 6, 3, padding=1), relu(), nn.MaxPool2d(2),
            conv(6, 8, 3, padding=1), relu(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.4])
def test_the_best_widths_are_the_best_of_all_that_are_tried(share):
    shape, steps = (3, 16, 16), 4
    module = Chain.from_module(Small(), shape).to_module()
    profile, groups = profile_by(shape, bits=32), all_groups(module, shape)
    before = {group.name: width(module, group) for group in groups}
    worth = {"0": 1.0, "2": 3.0}

    def loss(name, channels):
        return worth[name] * (before[name] / channels - 1)

    assert list(before) == ["0", "2"] and blocks_of(module, shape, groups)["2"] == (1, 2)
    bound = int(share * profile(module).peak_bytes)
    every = [
        dict(zip(before, (before["0"] * i // steps, before["2"] * j // steps), strict=True))
        for i, j in product(range(1, steps + 1), repeat=2)
    ]
    fitting = [w for w in every if profile(narrowed_meta_copy(module, groups, w)).peak_bytes <= bound]
    if not fitting:
        with pytest.raises(ModelError, match="the smallest peak is"):
            best_widths(module, shape, profile, bound, loss, steps)
        return
    found = before | best_widths(module, shape, profile, bound, loss, steps)
    assert profile(narrowed_meta_copy(module, groups, found)).peak_bytes <= bound
    least = min(sum(loss(name, w[name]) for name in w) for w in fitting)
    assert sum(loss(name, found[name]) for name in found) == pytest.approx(least)


def test_nothing_is_pruned_where_all_fits():
    shape = (3, 16, 16)
    module, profile = Chain.from_module(Small(), shape).to_module(), profile_by(shape)
    peak = profile(module).peak_bytes
    assert best_widths(module, shape, profile, peak, lambda name, channels: 1 / channels) == {}
    assert widths_for(module, shape, profile, peak) == {}


def test_a_proxy_that_counts_bytes_saved_early_prunes_mobilenet_as_a_whole():
    shape = (3, 96, 96)
    module, profile = on_meta("mobilenet_v2", 96), profile_by(shape)
    groups = all_groups(module, shape)
    before = {group.name: width(module, group) for group in groups}
    bound = profile(module).peak_bytes // 2
    found = best_widths(module, shape, profile, bound, lambda name, channels: 1 - channels / before[name], steps=4)
    assert profile(narrowed_meta_copy(module, groups, found)).peak_bytes <= bound
    assert 0 < len(found) < len(groups)


def test_no_choice_at_all_is_refused():
    module = Chain.from_module(Small(), (3, 16, 16)).to_module()
    with pytest.raises(UsageError, match="one choice of width at least"):
        best_widths(module, (3, 16, 16), profile_by((3, 16, 16)), 10, lambda name, channels: 0.0, steps=0)
