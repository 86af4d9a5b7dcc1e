"""Widths of real networks that fit a target, against trying and profiling."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_rule import profile_by
from surgery_zoo import on_meta

from snugfit.errors import ModelError
from snugfit.surgery import (
    hidden_groups,
    kept_width,
    narrowed_meta_copy,
    widest_widths,
    widths_for,
)


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


def test_nothing_is_pruned_where_all_fits():
    module, profile = on_meta("resnet18", 64), profile_by((3, 64, 64))
    assert widths_for(module, (3, 64, 64), profile, max(temporary(profile, module))) == {}


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
