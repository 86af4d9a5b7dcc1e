"""Widths of real networks that fit a target or a bound, against trying and profiling."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_rule import profile_by
from surgery_zoo import on_meta

from snugfit._chain import Chain
from snugfit.errors import ModelError, UsageError
from snugfit.surgery import (
    best_widths,
    blocks_of,
    hidden_groups,
    kept_width,
    narrowed_meta_copy,
    widest_widths,
    width,
    widths_for,
)
from snugfit.surgery.fitting import WidthOptions, choose_widths, smallest_peak


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
    assert min(temporary(profile, module)[1:5]) > target
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


@st.composite
def networks(draw):
    """Blocks whose temporary memory grows with the widths of one or two groups; a group may lie in two blocks."""
    count = draw(st.integers(1, 4))
    before = {f"g{i}": draw(st.integers(1, 7)) for i in range(count)}
    crosses = [draw(st.booleans()) for _ in range(count)]
    carriers = {b: [f"g{b}"] + ([f"g{b - 1}"] if b and crosses[b - 1] else []) for b in range(count)}
    base = [draw(st.integers(0, 20)) for _ in range(count)]
    per = {(b, name): draw(st.integers(1, 9)) for b, names in carriers.items() for name in names}

    def temporary(widths):
        return [base[b] + sum(per[b, name] * widths[name] for name in carriers[b]) for b in range(count)]

    return before, carriers, temporary, draw(st.integers(10, 90))


@settings(max_examples=150)
@given(networks())
def test_no_group_could_be_wider(network):
    before, carriers, temporary, target = network
    try:
        found = widest_widths(before, carriers, temporary, target)
    except ModelError:
        assert max(temporary(dict.fromkeys(before, 1))) > target
        return
    widths = before | found
    assert all(1 <= widths[name] < before[name] for name in found)
    assert max(temporary(widths)) <= target
    for name in found:
        needed = temporary(widths | {name: widths[name] + 1})
        assert any(needed[block] > target for block, names in carriers.items() if name in names)


@settings(max_examples=100)
@given(networks())
def test_where_blocks_share_no_group_the_widths_are_the_largest(network):
    before, carriers, temporary, target = network
    if any(len(names) > 1 for names in carriers.values()):
        return
    fitting = [
        dict(zip(before, choice, strict=True))
        for choice in product(*(range(1, size + 1) for size in before.values()))
        if max(temporary(dict(zip(before, choice, strict=True)))) <= target
    ]
    if not fitting:
        with pytest.raises(ModelError):
            widest_widths(before, carriers, temporary, target)
        return
    largest = {name: max(widths[name] for widths in fitting) for name in before}
    assert before | widest_widths(before, carriers, temporary, target) == largest


def test_groups_of_one_block_shrink_alike():
    """Two inner widths of a bottleneck: one ratio, then the first grows by what is left."""

    def temporary(widths):
        return [3 * widths["a"] + 3 * widths["b"]]

    assert widest_widths({"a": 10, "b": 20}, {0: ["a", "b"]}, temporary, 46) == {"a": 5, "b": 10}
    assert widest_widths({"a": 10, "b": 20}, {0: ["a", "b"]}, temporary, 51) == {"a": 6, "b": 11}


def test_blocks_at_the_target_keep_their_width():
    assert widest_widths({"a": 96}, {0: ["a"]}, lambda widths: [widths["a"]], 21) == {"a": 21}
    assert widest_widths({"a": 96}, {0: ["a"]}, lambda widths: [widths["a"]], 96) == {}
    with pytest.raises(ModelError, match="block 0 needs at least 8 bytes with any pruning, more than the target of 7"):
        widest_widths({"a": 12}, {0: ["a"]}, lambda widths: [8 * widths["a"]], 7)


def test_a_sensitive_block_without_channels_to_remove_is_an_error():
    with pytest.raises(ModelError, match="block 1 needs at least 30 bytes"):
        widest_widths({"a": 4}, {0: ["a"]}, lambda widths: [widths["a"], 30], 20)


@pytest.mark.parametrize(("channels", "ratio", "left"), [(32, 0.3, 22), (96, 0.78, 21), (144, 0.46, 78), (5, 0.0, 5)])
def test_the_papers_ratios_leave_widths(channels, ratio, left):
    assert kept_width(channels, ratio, "layer") == left


@pytest.mark.parametrize(
    ("ratio", "says"), [(0.99, "would empty layer a, which has 8"), (1.0, "below 1"), (-0.1, "at least 0")]
)
def test_a_ratio_that_empties_a_layer_is_an_error(ratio, says):
    with pytest.raises(ModelError, match=says):
        kept_width(8, ratio, "a")


@st.composite
def chains(draw):
    """Up to five blocks of up to four choices, of which some depend on the choice before."""
    blocks, before = [], 1
    for _ in range(draw(st.integers(1, 5))):
        own = draw(st.integers(1, 4))
        rows = before if draw(st.booleans()) else 1
        loss = draw(st.lists(st.integers(0, 6), min_size=own, max_size=own))
        peak, saved = (
            [draw(st.lists(st.integers(0, 30), min_size=own, max_size=own)) for _ in range(rows)] for _ in range(2)
        )
        blocks.append(WidthOptions(np.array(loss, float), np.array(peak), np.array(saved)))
        before = own
    return blocks


def cost(blocks, choices):
    """Equations (1) to (3), as they are written."""
    saved, peaks, loss, before = 0, [], 0.0, 0
    for block, own in zip(blocks, choices, strict=True):
        row = before if len(block.peak) > 1 else 0
        peaks.append(saved + block.peak[row, own])
        saved, loss, before = saved + block.saved[row, own], loss + block.loss[own], own
    return loss, max(peaks)


@settings(max_examples=200, deadline=None)
@given(chains(), st.integers(0, 90))
def test_it_is_the_best_of_all(blocks, bound):
    every = [(*cost(blocks, c), c) for c in product(*(range(len(block.loss)) for block in blocks))]
    fitting = [found for found in every if found[1] <= bound]
    assert smallest_peak(blocks) == min(peak for _, peak, _ in every)
    if not fitting:
        with pytest.raises(ModelError, match=f"the smallest peak is {smallest_peak(blocks)} bytes"):
            choose_widths(blocks, bound)
        return
    found = choose_widths(blocks, bound)
    assert found.loss == min(loss for loss, *_ in fitting)
    assert cost(blocks, found.choices) == (found.loss, found.peak)
    assert found.peak <= bound


def test_pruning_early_can_spare_later_blocks():
    """A greedy choice prunes the block that is too large; cheaper is to save less before it."""
    full = WidthOptions(np.array([0.0, 1.0]), np.array([[9, 5]]), np.array([[8, 2]]))
    small = WidthOptions(np.array([0.0, 5.0]), np.array([[10, 4]]), np.array([[0, 0]]))
    assert choose_widths([full, small], 12).choices == (1, 0)


def test_a_long_chain_of_many_choices_is_no_matter():
    rng = np.random.default_rng(0)
    loss, sizes = np.sort(rng.random((18, 8)))[:, ::-1], np.sort(rng.integers(1, 10**6, (18, 8)))
    blocks = [WidthOptions(loss[i], sizes[i : i + 1] * 3, sizes[i : i + 1]) for i in range(18)]
    least = smallest_peak(blocks)
    found = [choose_widths(blocks, int(least * factor)).loss for factor in (1.0, 1.5, 3.0)]
    assert found == sorted(found, reverse=True)
