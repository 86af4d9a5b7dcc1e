"""Algorithm 1 of NeuroFlux against its printed lines, the repair of blocks, and the choice of the exit."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit._core.record import ExitRecord
from snugfit.strategies.blockwise.partition import (
    Block,
    choose_exit,
    cut,
    partition,
    repair,
    saturated,
    shrunk,
    standard_error,
)

batch_lists = st.lists(st.integers(1, 600), min_size=1, max_size=12)
tenths = st.integers(0, 12)


def printed_algorithm(batches, rho_tenths):
    """Lines 6 to 17 of Algorithm 1 word for word, in whole numbers: 10 |b' - b| <= (10 rho) b."""
    b = [None, *batches]
    layers = len(batches)
    blocks = []
    i = 1
    while i <= layers:
        block_layers, block_batch = [i], b[i]
        while i + 1 <= layers and 10 * abs(b[i + 1] - b[i]) <= rho_tenths * b[i]:
            block_batch = min(block_batch, b[i + 1])
            block_layers.append(i + 1)
            i += 1
        blocks.append((block_layers, block_batch))
        i += 1
    return blocks


@given(batch_lists, tenths)
def test_equals_the_printed_algorithm(batches, rho_tenths):
    found = [([u + 1 for u in block.units], block.batch_size) for block in partition(batches, rho_tenths / 10)]
    assert found == printed_algorithm(batches, rho_tenths)


@given(batch_lists, tenths)
def test_properties(batches, rho_tenths):
    blocks = partition(batches, rho_tenths / 10)
    assert [unit for block in blocks for unit in block.units] == list(range(len(batches)))
    for block in blocks:
        assert block.batch_size == min(batches[unit] for unit in block.units)
        for unit in list(block.units)[1:]:
            assert 10 * abs(batches[unit] - batches[unit - 1]) <= rho_tenths * batches[unit - 1]
    for before, after in pairwise(blocks):
        assert 10 * abs(batches[after.first] - batches[before.last]) > rho_tenths * batches[before.last]


@given(batch_lists, tenths, st.integers(1, 4))
def test_blocks_are_cut_into_stretches_that_keep_their_boundaries(batches, rho_tenths, most):
    blocks = partition(batches, rho_tenths / 10)
    pieces = cut(blocks, batches, most)
    assert [unit for piece in pieces for unit in piece.units] == list(range(len(batches)))
    assert {block.first for block in blocks} <= {piece.first for piece in pieces}
    assert all(len(piece.units) <= most for piece in pieces)
    assert all(piece.batch_size == min(batches[unit] for unit in piece.units) for piece in pieces)
    if most >= len(batches):
        assert pieces == blocks


def test_each_unit_is_compared_with_the_one_before_it_and_not_with_the_first():
    assert partition([100, 140, 196, 274], 0.4) == [Block(0, 3, 100)]


def test_the_threshold_is_inclusive():
    assert partition([10, 14], 0.4) == [Block(0, 1, 10)]
    assert partition([10, 15], 0.4) == [Block(0, 0, 10), Block(1, 1, 15)]
    assert partition([10, 6], 0.4) == [Block(0, 1, 6)]


def test_the_rule_is_relative_to_the_earlier_unit():
    assert len(partition([100, 141], 0.4)) == 2
    assert len(partition([141, 100], 0.4)) == 1


def test_a_threshold_of_zero_joins_equals_and_one_joins_all_that_fall():
    assert partition([8, 8, 9], 0.0) == [Block(0, 1, 8), Block(2, 2, 9)]
    assert partition([512, 30, 2, 1], 1.0) == [Block(0, 3, 1)]


def test_a_unit_that_fits_no_sample_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        partition([4, 0, 4], 0.4)


def made_up_fits(kept, per_sample, headroom):
    """A block keeps the sum of its units' bytes and needs its hungriest unit's step."""

    def fits(block):
        return (
            sum(kept[u] for u in block.units) + max(per_sample[u] for u in block.units) * block.batch_size <= headroom
        )

    return fits


@st.composite
def budgets(draw):
    count = draw(st.integers(1, 8))
    kept = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    per_sample = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    headroom = draw(st.integers(0, 120)) + max(k + s for k, s in zip(kept, per_sample, strict=True))
    batches = [min(64, (headroom - k) // s) for k, s in zip(kept, per_sample, strict=True)]
    return batches, made_up_fits(kept, per_sample, headroom)


@given(budgets(), tenths, st.booleans())
def test_repaired_blocks_cover_and_fit(budget, rho_tenths, fixed):
    batches, fits = budget
    if fixed:
        batches = [min(batches)] * len(batches)
    blocks = partition(batches, rho_tenths / 10)
    pieces = repair(blocks, batches, fits, fixed_batch=fixed)
    assert [unit for piece in pieces for unit in piece.units] == list(range(len(batches)))
    assert all(fits(piece) for piece in pieces)
    assert all(1 <= piece.batch_size <= min(batches[u] for u in piece.units) for piece in pieces)
    firsts = {block.first for block in blocks}
    assert firsts <= {piece.first for piece in pieces}, "a piece lies across two blocks"
    for block in blocks:
        if fits(block):
            assert block in pieces
    for piece, following in pairwise(pieces):
        if following.first not in firsts:
            longer = Block(piece.first, following.first, min(piece.batch_size, batches[following.first]))
            assert not fits(longer), "a piece could have been longer"


def test_repair_by_hand():
    """Two units fit together, three do not; the piece on its own goes back to its own batch."""
    fits = made_up_fits(kept=[30, 30, 30], per_sample=[1, 1, 1], headroom=100)
    blocks = [Block(0, 2, 40)]
    assert repair(blocks, [40, 50, 60], fits) == [Block(0, 1, 40), Block(2, 2, 60)]
    assert repair(blocks, [40, 50, 60], fits, fixed_batch=True) == [Block(0, 1, 40), Block(2, 2, 40)]


def test_a_single_unit_that_does_not_fit_is_shrunk_to_what_does():
    fits = made_up_fits(kept=[10, 10], per_sample=[3, 3], headroom=40)
    assert repair([Block(0, 1, 16)], [16, 16], fits) == [Block(0, 0, 10), Block(1, 1, 10)]
    assert repair([Block(0, 0, 16)], [16], lambda block: False) == [Block(0, 0, 0)]


@given(st.integers(0, 100), st.integers(0, 100))
def test_shrunk_is_the_largest_batch_that_fits(batch, most):
    assert shrunk(Block(2, 4, batch), lambda block: block.batch_size <= most) == Block(2, 4, min(batch, most))


def test_thresholds_with_awkward_floats_stay_inclusive():
    for hundredths in range(1, 100):
        exact = [100, 100 + hundredths]
        assert len(partition(exact, hundredths / 100)) == 1, hundredths
        assert len(partition(exact, math.nextafter(hundredths / 100, 0) - 1e-6)) == 2


def exits(*pairs):
    return [ExitRecord(f"u{i}", i, accuracy, parameters) for i, (accuracy, parameters) in enumerate(pairs)]


LADDER = exits((0.60, 10), (0.88, 20), (0.90, 40), (0.89, 80))

some_exits = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=8).map(
    lambda pairs: exits(*[(accuracy / 20, parameters) for accuracy, parameters in pairs])
)


@pytest.mark.parametrize(("tolerance", "index"), [(0.0, 2), (0.0199, 2), (0.021, 1), (0.31, 0), (1.0, 0)])
def test_tolerance_is_the_accuracy_given_up_for_size(tolerance, index):
    assert choose_exit(LADDER, 100, tolerance).index == index


@pytest.mark.parametrize(("best", "other", "tolerance"), [(0.8, 0.7, 0.1), (0.4, 0.35, 0.05), (0.9, 0.6, 0.3)])
def test_exactly_the_tolerance_may_be_given_up(best, other, tolerance):
    assert choose_exit(exits((other, 1), (best, 2)), 20, tolerance).index == 0


def test_one_standard_error_by_default():
    error = math.sqrt(0.9 * 0.1 / 100)
    assert standard_error(0.9, 100) == pytest.approx(error) == pytest.approx(0.03)
    assert choose_exit(LADDER, 100).index == 1
    assert choose_exit(LADDER, 100_000).index == 2


def test_standard_error_at_the_ends():
    assert standard_error(0.0, 10) == standard_error(1.0, 10) == 0.0
    assert standard_error(0.5, 0) == 0.5


def test_of_equal_size_the_more_accurate_of_equal_accuracy_the_smaller():
    assert choose_exit(exits((0.8, 10), (0.9, 10)), 10, 0.5).index == 1
    assert choose_exit(exits((0.9, 30), (0.9, 10)), 10, 0.0).index == 1


@given(some_exits, st.floats(0, 1))
def test_the_choice_is_eligible_and_no_eligible_one_is_smaller(records, tolerance):
    chosen = choose_exit(records, 50, tolerance)
    best = max(r.val_accuracy for r in records)
    assert chosen.val_accuracy >= best - tolerance
    for other in records:
        if other.val_accuracy >= best - tolerance:
            assert (chosen.parameters, -chosen.val_accuracy) <= (other.parameters, -other.val_accuracy)


def test_the_first_block_is_never_saturated():
    assert not saturated(exits((0.1, 1), (0.1, 2)), [0, 1], 100)
    assert not saturated([], [0], 100)


def test_a_block_is_saturated_unless_it_gains_more_than_a_standard_error():
    """One standard error of 0.5 on 100 samples is 0.05."""
    assert saturated(exits((0.5, 1), (0.549, 2)), [1], 100)
    assert not saturated(exits((0.5, 1), (0.551, 2)), [1], 100)
    assert saturated(exits((0.5, 1), (0.2, 2), (0.54, 3)), [1, 2], 100)
    assert not saturated(exits((0.5, 1), (0.56, 2), (0.1, 3)), [1, 2], 100)


def test_the_best_exit_before_counts_wherever_it_was():
    assert saturated(exits((0.9, 1), (0.5, 2), (0.7, 3)), [2], 100)


def test_a_gain_of_exactly_one_standard_error_is_none():
    assert standard_error(0.5, 100) == 0.05
    assert saturated(exits((0.5, 1), (0.55, 2)), [1], 100)
