"""Blocks, their bytes and their cost from needs, by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategy_samples import HARDWARE, MB, profile, workload

from snugfit._core.budget import Budget
from snugfit._core.plan import Phase
from snugfit._core.profile import ProbeLine, ProbePoint
from snugfit.strategies.blockwise.blocks import Residency, UnitNeeds, block_name, estimate_blocks, make_blocks
from snugfit.strategies.blockwise.partition import Block
from snugfit.strategies.blockwise.strategy import Blockwise
from snugfit.strategies.memory_estimates import SAFETY, with_safety


def need(kept, fixed, sample, elements=0, output=0, smallest=1, name="u", **more):
    return UnitNeeds(name, kept, fixed, sample, elements, 2 * elements, 2 * output, smallest, **more)


def residency(needs, headroom=math.inf, base=0, all_units=False, recompute=False):
    return Residency(needs, base, headroom, all_units, recompute)


PAIR = [need(100, 150, 10, elements=3, output=5), need(40, 60, 20, elements=5, output=2)]


def test_one_units_bytes_are_its_lines():
    made = residency(PAIR)
    assert made.bytes_of(Block(0, 0, 7)) == 150 + 70
    assert made.bytes_of(Block(1, 1, 7)) == 60 + 140


def test_a_blocks_bytes_by_hand():
    """Kept: 100 + 40. Steps: 50 + 10 b, and 20 + 20 b with the block's input held in place of the unit's own.

    The input of three values stays in float32 (12 bytes) and twice in float16 (12), where the line has twice five
    values in float16 (20): 4 bytes a sample more.
    """
    made = residency(PAIR)
    assert made.bytes_of(Block(0, 1, 7)) == 140 + max(50 + 70, 20 + 140 + 4 * 7)
    assert made.bytes_of(Block(0, 1, 1)) == 140 + 60


def test_kernels_of_earlier_blocks_are_still_in_memory():
    """New batch sizes leave 6, 3 and 2 bytes of kernels for good; the own ones are part of a unit's 20, 30 and 40.

    Passes without training leave a third of that in addition, once a block is trained.
    """
    needs = [need(0, 20, 10, shape_bytes=6), need(0, 30, 10, shape_bytes=3), need(0, 40, 10, shape_bytes=2)]
    made = residency(needs)
    assert [made.bytes_of(Block(i, i, 2)) for i in range(3)] == [40, 50 + 6 + 2, 60 + 9 + 3]
    assert made.bytes_of(Block(1, 2, 2)) == max(30 + 20 - 3, 40 + 20 - 2) + 11 + 2, "kernels of both units stay"
    assert residency(needs, headroom=72).largest_batches(9) == [5, 3, 2]


def test_kernels_of_measured_batches_are_in_memory_before_training():
    """All units were measured at 8; the first trains at 8, the second at 4, and passes leave a third of 6 and 3."""
    needs = [need(0, 20, 10, shape_bytes=size, measured=(2, 8)) for size in (6, 3, 9)]
    made, blocks = residency(needs), [Block(0, 0, 8), Block(1, 1, 4), Block(2, 2, 8)]
    final = Phase("exit", 0, 0.0, 1)
    cost = estimate_blocks(made, blocks, [[0.0]] * 3, workload(train_count=90, val_count=10), 1, final)
    step = [20 + 80 - 6, 20 + 40 - 3, 20 + 80 - 9]
    wanted = [step[0], step[1] + 3 + 6 / 3, step[2] + 3 + (6 + 3) / 3]
    assert [phase.peak_bytes for phase in cost.phases[:3]] == [with_safety(0, size) for size in wanted]
    assert [made.bytes_of(block) for block in blocks] == [100, 57 + 9 + 2, 91 + 18 + 3], "blocks before may change"


def test_a_batch_that_was_not_measured_may_need_more_workspace():
    """100 + 10 b, and 35 bytes more above the measured batch of 4."""
    needs = [need(0, 100, 10, measured_batch=4, partial_bytes=35)]
    assert [residency(needs).bytes_of(Block(0, 0, batch)) for batch in (4, 5)] == [140, 185]
    largest = {headroom: residency(needs, headroom=headroom).largest_batches(9) for headroom in (139, 184, 185, 999)}
    assert largest == {139: [3], 184: [4], 185: [5], 999: [9]}


def test_lines_say_what_a_trained_unit_leaves_behind():
    """A unit of which one batch size was measured is taken to leave as much as the middle one of the others."""
    lines = {
        f"unit:{name}": ProbeLine(f"unit:{name}", 10 * MB, MB, 0.0, 0.0, 0.1, points, 1, shape)
        for name, points, shape in (
            ("a", (ProbePoint(2, 12 * MB, 0.1), ProbePoint(8, 18 * MB, 0.1)), 3.0 * MB),
            ("b", (ProbePoint(2, 12 * MB, 0.1),), 0.0),
            ("c", (ProbePoint(2, 12 * MB, 0.1), ProbePoint(8, 18 * MB, 0.1)), 1.0 * MB),
        )
    }  # fmt: skip
    lines["unit:c"] = replace(lines["unit:c"], partial_bytes=5 * MB)
    made = profile(lines, units=("a", "b", "c", "head"), kept=dict.fromkeys(lines, 0))
    needs = Blockwise()._needs(workload(), made)
    assert [(each.measured_batch, each.partial_bytes) for each in needs] == [(8, 0), (2, 0), (8, 5 * MB)]
    assert [each.shape_bytes for each in needs] == [3 * MB, 2 * MB, MB]
    assert [each.fixed_bytes for each in needs] == [13 * MB, 12 * MB, 11 * MB]
    filled = Blockwise(blocks=((0, 0, 4), (1, 1, 4), (2, 2, 4)))
    peaks = [phase.peak_bytes for phase in filled.estimate(workload(), made, HARDWARE).phases]
    assert peaks[:3] == [with_safety(0, step * MB) for step in (17, 16 + 3 + 1, 15 + 5 + 5 / 3)]


def test_a_step_between_measured_points_is_at_most_on_the_line_through_both():
    """A line through all three points, raised so that none lies above it, is 3 MB above the middle of two of them."""
    points = tuple(ProbePoint(batch, peak * MB, 0.1) for batch, peak in ((2, 10), (4, 10), (8, 26)))
    line = ProbeLine("unit:a", 5 * MB, 2 * MB, 5 * MB, 0.0, 0.1, points, shape_bytes=1.0 * MB)
    made = profile({"unit:a": line}, units=("a", "head"), kept={"unit:a": 0})
    (need,) = Blockwise()._needs(workload(), made)
    steps = [need.step_bytes(batch) / MB for batch in (2, 4, 6, 8, 9)]
    assert steps == pytest.approx([11, 11, 19, 27, 29], abs=1e-5), "and 1 MB of kernels"
    assert [need.largest_batch(size * MB, 64) for size in (10.5, 19.1, 28.9, 29.1)] == [0, 6, 8, 9]


def test_a_profile_of_larger_modules_alone_has_a_shortfall():
    """The search for the smallest budget goes on below the one for which modules were measured."""
    floors = {"unit:a..b": 30 * MB, "unit:c": 10 * MB}
    made = profile({}, units=("a", "b", "c", "head"), kept=dict.fromkeys(floors, 0), floors=floors)
    lack = Blockwise(module_units="auto").shortfall(workload(), made, HARDWARE, Budget(20 * MB))
    assert lack.smallest_bytes > 30 * MB and "a..b" in lack.reasons[0]


def test_classic_local_learning_keeps_every_unit():
    made = residency(PAIR, all_units=True)
    assert made.bytes_of(Block(0, 0, 7)) == 150 + 70 + 40
    assert made.bytes_of(Block(1, 1, 7)) == 60 + 140 + 100


def test_recomputation_holds_images_and_the_units_before():
    needs = [
        need(100, 150, 10, elements=3, weight_bytes=30, saved_bytes=9),
        need(40, 60, 20, elements=5, weight_bytes=11, saved_bytes=4),
        need(40, 60, 20, elements=5, weight_bytes=1000, saved_bytes=1000),
    ]
    made, cached = residency(needs, recompute=True), residency(needs)
    assert made.bytes_of(Block(0, 1, 7)) == cached.bytes_of(Block(0, 1, 7))
    assert made.bytes_of(Block(2, 2, 7)) == cached.bytes_of(Block(2, 2, 7)) + 30 + 11 + 8 * 9 + 7 * 3 * 5


def test_largest_batches_by_hand():
    assert residency(PAIR, headroom=260).largest_batches(64) == [11, 10]
    assert residency(PAIR, headroom=260).largest_batches(10) == [10, 10]
    assert residency(PAIR, headroom=155).largest_batches(64) == [0, 4]
    assert residency(PAIR, headroom=260, all_units=True).largest_batches(64) == [7, 5]
    assert residency(PAIR).largest_batches(64) == [64, 64]


def test_a_unit_that_needs_two_samples():
    assert residency([need(0, 100, 10, smallest=2)], headroom=115).largest_batches(64) == [0]
    assert residency([need(0, 100, 10, smallest=2)], headroom=120).largest_batches(64) == [2]


def test_a_flat_line_and_a_unit_without_one():
    assert residency([need(0, 100, 0.0)], headroom=90).largest_batches(64) == [0]
    assert residency([need(0, 100, 0.0)], headroom=100).largest_batches(64) == [64]
    for headroom in (90, math.inf):
        assert residency([need(0, math.inf, math.inf)], headroom=headroom).largest_batches(64) == [0]


def test_blocks_by_hand():
    """Batches 10, 12, 40: the first two would join, but together they keep 10 bytes too many; the third is far off."""
    needs = [need(10, 100, 10), need(10, 80, 10), need(10, 100, 2.5)]
    blocks = make_blocks(residency(needs, headroom=200), 64, 0.4, adaptive_batch=True)
    assert blocks == [Block(0, 0, 10), Block(1, 1, 12), Block(2, 2, 40)]


def test_blocks_that_fit_together_stay_together():
    needs = [need(10, 100, 10), need(10, 110, 9), need(10, 500, 1)]
    made = residency(needs, headroom=660)
    assert made.largest_batches(50) == [50, 50, 50]
    assert make_blocks(made, 50, 0.4, adaptive_batch=True) == [Block(0, 2, 50)]
    cut = make_blocks(made, 50, 0.4, adaptive_batch=True, most_units=2)
    assert [block.units for block in cut] == [range(2), range(2, 3)]


def test_without_adaptive_batches_the_smallest_is_everywhere():
    needs = [need(10, 100, 10), need(10, 100, 2)]
    made = residency(needs, headroom=200)
    assert made.largest_batches(64) == [10, 50]
    blocks = make_blocks(made, 64, 0.4, adaptive_batch=False)
    assert {block.batch_size for block in blocks} == {10}
    assert [unit for block in blocks for unit in block.units] == [0, 1]


def test_no_blocks_where_a_unit_fits_at_no_batch():
    assert make_blocks(residency(PAIR, headroom=155), 64, 0.4, adaptive_batch=True) == []


def test_where_all_units_stay_the_batch_is_lowered_until_the_block_fits():
    """Alone the second unit would hold 10 samples; behind the first it holds that one's large input too."""
    needs = [need(10, 20, 1, elements=100), need(10, 20, 10, elements=1)]
    made = residency(needs, headroom=130, all_units=True)
    assert made.largest_batches(64) == [64, 10]
    assert make_blocks(made, 64, 1.0, adaptive_batch=True) == []
    larger = residency(needs, headroom=3000, all_units=True)
    (block,) = make_blocks(larger, 64, 0.0, adaptive_batch=False)
    assert (block.first, block.last) == (0, 1)
    assert larger.bytes_of(block) <= 3000 < larger.bytes_of(Block(0, 1, block.batch_size + 1))


def test_a_block_whose_batch_a_unit_cannot_train_on_is_none():
    needs = [need(0, 100, 10), need(0, 100, 5, smallest=2)]
    made = residency(needs, headroom=110)
    assert made.largest_batches(64) == [1, 2]
    assert make_blocks(made, 64, 1.0, adaptive_batch=True) == []
    assert make_blocks(made, 64, 0.4, adaptive_batch=False) == []


whole_needs = st.lists(
    st.builds(
        lambda kept, step, sample, elements, smallest: need(kept, kept + step, sample, elements, 1, smallest),
        st.integers(0, 100), st.integers(0, 100), st.integers(0, 20), st.integers(0, 5), st.integers(1, 2),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@given(
    whole_needs,
    st.integers(0, 2000),
    st.integers(1, 64),
    st.integers(0, 10),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_blocks_fit_cover_and_can_be_trained(needs, headroom, limit, rho_tenths, adaptive, all_units, recompute):
    made = residency(needs, headroom=headroom, all_units=all_units, recompute=recompute)
    blocks = make_blocks(made, limit, rho_tenths / 10, adaptive_batch=adaptive)
    if not blocks:
        return
    assert [unit for block in blocks for unit in block.units] == list(range(len(needs)))
    for block in blocks:
        assert made.bytes_of(block) <= headroom
        assert max(needs[u].smallest_batch for u in block.units) <= block.batch_size <= limit


@given(whole_needs, st.integers(0, 2000))
def test_if_every_unit_fits_there_are_blocks(needs, headroom):
    made = residency(needs, headroom=headroom)
    if min(made.largest_batches(64)) >= 2:
        assert make_blocks(made, 64, 0.4, adaptive_batch=True)


def test_cost_by_hand():
    needs = [
        need(100, 150, 10, elements=3, output=5, name="a"), need(40, 60, 20, elements=5, output=2, name="b"),
        need(10, 30, 5, elements=2, output=1, name="c"),
    ]  # fmt: skip
    made = residency(needs, base=1000)
    blocks, seconds = [Block(0, 1, 8), Block(2, 2, 16)], [[0.02, 0.03], [0.01]]
    final = Phase("exit", 777, 4.0, 5)
    cost = estimate_blocks(made, blocks, seconds, workload(train_count=1000, val_count=200, epochs=3), 2, final)
    first, second, last = cost.phases
    assert last is final

    rows = 1000 * 2 + 200
    assert first.name == "block 1: a to b" and first.units == ("a", "b") and first.batch_size == 8
    assert first.peak_bytes == int((1000 + made.bytes_of(blocks[0])) * (1 + SAFETY.share)) + SAFETY.bytes
    statistics = 256  # images that norms' statistics are taken over, once for each block
    assert first.seconds == pytest.approx(0.05 * 1000 * 3 + 0.35 * 0.05 * (rows + statistics))
    assert first.storage_bytes == rows * (2 * 2 + 8), "with a label beside each row"
    assert second.name == "block 2: c" and second.storage_bytes == 0
    assert second.seconds == pytest.approx(0.01 * 1000 * 3 + 0.35 * 0.01 * (200 + statistics))
    assert cost.seconds == pytest.approx(first.seconds + second.seconds + 4.0)
    assert cost.seconds_per_epoch == pytest.approx(0.05 * 1000 + 0.01 * 1000)
    assert cost.storage_bytes == first.storage_bytes
    assert cost.peak_bytes == max(first.peak_bytes, second.peak_bytes)


def test_two_caches_lie_side_by_side():
    needs = [need(1, 1, 1, output=o, name=n) for n, o in (("a", 10), ("b", 30), ("c", 20), ("d", 5))]
    blocks = [Block(i, i, 4) for i in range(4)]
    cost = estimate_blocks(
        residency(needs), blocks, [[0.0]] * 4, workload(train_count=90, val_count=10), 1, Phase("exit", 0, 0.0, 1)
    )
    assert [phase.storage_bytes for phase in cost.phases] == [2800, 6800, 4800, 0, 0]
    assert cost.storage_bytes == 11_600


def test_recomputation_costs_time_instead_of_storage():
    needs = [need(1, 1, 1, output=10, name="a"), need(1, 1, 1, output=10, name="b")]
    work, final = workload(train_count=100, val_count=10, epochs=2), Phase("exit", 0, 0.0, 1)
    blocks, seconds = [Block(0, 0, 4), Block(1, 1, 4)], [[0.5], [0.25]]
    stored = estimate_blocks(residency(needs), blocks, seconds, work, 1, final)
    again = estimate_blocks(residency(needs, recompute=True), blocks, seconds, work, 1, final)
    assert stored.storage_bytes > 0 == again.storage_bytes
    assert again.seconds_per_epoch - stored.seconds_per_epoch == pytest.approx(0.35 * 0.5 * 100)


def test_names():
    assert block_name(["a"], 0) == "block 1: a"
    assert block_name(["a", "b", "c"], 4) == "block 5: a to c"
