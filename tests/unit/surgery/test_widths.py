"""Widths that bring temporary memory to a target: the widest there are, against brute force."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snugfit.errors import ModelError
from snugfit.surgery import kept_width, pruning_ratios, sensitive_blocks, widest_widths


def test_blocks_above_the_cumulative_memory_are_sensitive():
    """Section V, step 1: above, not at."""
    assert sensitive_blocks([5, 19, 20, 21, 40], 20) == (3, 4)


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


def test_multiples_are_asked_for():
    def temporary(widths):
        return [widths["a"]]

    assert widest_widths({"a": 96}, {0: ["a"]}, temporary, 21) == {"a": 21}
    assert widest_widths({"a": 96}, {0: ["a"]}, temporary, 21, multiple=8) == {"a": 16}
    with pytest.raises(ModelError, match="block 0 needs at least 8 bytes with any pruning, more than the target of 7"):
        widest_widths({"a": 96}, {0: ["a"]}, temporary, 7, multiple=8)


def test_a_sensitive_block_without_channels_to_remove_is_an_error():
    with pytest.raises(ModelError, match="block 1 needs at least 30 bytes"):
        widest_widths({"a": 4}, {0: ["a"]}, lambda widths: [widths["a"], 30], 20)


def test_ratios_are_what_goes():
    assert pruning_ratios({"a": 32, "b": 96}, {"a": 24, "b": 24}) == {"a": 0.25, "b": 0.75}


@pytest.mark.parametrize(("channels", "ratio", "left"), [(32, 0.3, 22), (96, 0.78, 21), (144, 0.46, 78), (5, 0.0, 5)])
def test_the_papers_ratios_leave_widths(channels, ratio, left):
    assert kept_width(channels, ratio, "layer") == left


@pytest.mark.parametrize(
    ("ratio", "says"), [(0.99, "would empty layer a, which has 8"), (1.0, "below 1"), (-0.1, "at least 0")]
)
def test_a_ratio_that_empties_a_layer_is_an_error(ratio, says):
    with pytest.raises(ModelError, match=says):
        kept_width(8, ratio, "a")
