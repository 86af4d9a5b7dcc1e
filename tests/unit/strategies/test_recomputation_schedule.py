"""The dynamic program against all schedules, and schedules as text."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_samples import at_the_square_root, every_schedule, every_split

from snugfit.errors import UsageError
from snugfit.strategies.checkpoint.candidates import frontier, subsample
from snugfit.strategies.recomputation import dynamic_program
from snugfit.strategies.recomputation.dynamic_program import (
    DynamicProgram,
    PagingProgram,
    UnitCost,
    paged_bytes,
    schedule_cost,
)
from snugfit.strategies.recomputation.schedule import Schedule


def unit_cost(forward, output, kept, passing, saving, returning):
    """A unit that could exist: what it takes is at least what it gives, keeps and is given."""
    saved = output + kept
    return UnitCost(forward, 2 * forward, output, saved, output + passing, saved + saving, saved + returning)


small = st.integers(0, 4)
cost_lists = st.lists(
    st.builds(unit_cost, st.integers(1, 5).map(float), st.integers(1, 5), small, small, small, small),
    min_size=1,
    max_size=5,
)


def paged_unit_cost(cost, moved, kept, saving, backward):
    """The same unit, of which so much goes to disk; it takes at least what stays, its output, and the gradient."""
    peaks = {"paged_saving_peak": cost.output_bytes + kept + saving, "paged_backward_peak": cost.output_bytes + kept}
    peaks["paged_backward_peak"] += backward
    return replace(cost, paged_bytes=moved, paged_kept_bytes=kept, paging_speed=2.0, **peaks)


paged_cost_lists = st.lists(
    st.builds(
        paged_unit_cost,
        st.builds(unit_cost, st.integers(1, 5).map(float), st.integers(1, 5), small, small, small, small),
        st.integers(1, 20), st.integers(0, 1), small, small,
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


def operations(schedule, last):
    """What a schedule does, one after the other: (operation, unit), the forward pass and then back again."""
    done, entered = [], []
    for part in schedule.parts:
        if isinstance(part, Schedule):
            done += [("keep input", next(part.units)), *(("pass", unit) for unit in part.units)]
        else:
            done.append(("save", part))
        entered.append(part)
    for part in reversed(entered):
        done += operations(part, last) if isinstance(part, Schedule) else [("back", part)]
    return done


def simulate(schedule, costs):
    """Seconds and peak, by an account of every feature map and gradient."""
    seconds, peak, last = 0.0, 0, len(costs) - 1
    maps, saved, gradient = {-1}, set(), last  # outputs in memory; of units whose backward pass is prepared; whose
    size = [each.output_bytes for each in costs]

    def alive():
        loose = {unit for unit in maps - saved if unit >= 0}
        return sum(costs[unit].saved_bytes for unit in saved) + sum(size[unit] for unit in loose)

    kept_inputs = {0}
    for operation, unit in operations(schedule, last):
        own = costs[unit]
        if operation == "keep input":
            kept_inputs.add(unit)
        elif operation == "back":
            seconds += own.backward_seconds
            saved.discard(unit)
            maps.discard(unit)
            peak = max(peak, alive() + own.backward_peak)
            maps.discard(unit - 1)
            gradient = unit - 1
        else:
            most = own.discarding_peak if operation == "pass" else own.saving_peak
            peak = max(peak, alive() + size[gradient] + most)
            seconds += own.forward_seconds
            maps.add(unit)
            if operation == "save":
                saved.add(unit)
            if operation == "pass" and unit not in kept_inputs:
                maps.discard(unit - 1)
    return seconds, peak


@given(cost_lists)
@settings(max_examples=25)
def test_no_schedule_is_faster_in_the_same_memory(costs):
    found_costs = [schedule_cost(Schedule(parts), costs) for parts in every_schedule(0, len(costs) - 1)]
    most = max(peak for _, peak in found_costs)
    program = DynamicProgram(costs, most, slots=most)
    assert program.slot == 1
    for limit in range(most + 1):
        best = min((seconds for seconds, peak in found_costs if peak <= limit), default=float("inf"))
        assert program.seconds[limit] == best
        if best < float("inf"):
            seconds, peak = schedule_cost(program.schedule(limit), costs)
            assert seconds == best and peak <= limit
        else:
            with pytest.raises(ValueError, match="no schedule fits"):
                program.schedule(limit)


@given(cost_lists)
@settings(max_examples=25)
def test_the_cost_equals_an_account_of_every_feature_map(costs):
    for parts in every_schedule(0, len(costs) - 1):
        schedule = Schedule(parts)
        assert schedule_cost(schedule, costs) == pytest.approx(simulate(schedule, costs)), str(schedule)


@patch.object(dynamic_program, "PAGE_FILE_BYTES", 2)
@given(paged_cost_lists)
@settings(max_examples=25)
def test_no_schedule_with_paging_is_faster_in_the_same_memory(costs):
    """Against all schedules, with all numbers of first parts that page."""
    count = len(costs)
    every = [Schedule(parts, paged) for parts in every_schedule(0, count - 1) for paged in range(len(parts) + 1)]
    found_costs = [schedule_cost(schedule, costs) for schedule in every]
    most = max(peak for _, peak in found_costs)
    program = PagingProgram(costs, most, slots=most)
    for limit in range(most + 1):
        best = min((seconds for seconds, peak in found_costs if peak <= limit), default=float("inf"))
        assert program.seconds[limit] == pytest.approx(best)
        if best < float("inf"):
            seconds, peak = schedule_cost(program.schedule(limit), costs)
            assert seconds == pytest.approx(best) and peak <= limit


@patch.object(dynamic_program, "PAGE_FILE_BYTES", 2)
@given(paged_cost_lists)
@settings(max_examples=25)
def test_paging_costs_what_is_moved(costs):
    """A stretch costs its input; units cost what exceeds the time in which they compute."""
    speed, last = 2.0, len(costs) - 1
    units = Schedule(tuple(range(last + 1)), last + 1)
    seconds = sum(
        max(each.forward_seconds, each.paged_bytes / speed) + max(each.backward_seconds, each.paged_bytes / speed)
        for each in costs
    )
    assert schedule_cost(units, costs)[0] == pytest.approx(seconds)
    assert paged_bytes(units, costs) == sum(each.paged_bytes for each in costs)
    if last > 1:
        again = Schedule((0, Schedule((1,)), *range(2, last + 1)))
        paged = replace(again, paged=2)
        assert paged_bytes(paged, costs) == costs[0].paged_bytes + costs[0].output_bytes
        more = costs[0].paged_seconds - costs[0].forward_seconds - costs[0].backward_seconds
        expected = schedule_cost(again, costs)[0] + more + 2 * costs[0].output_bytes / speed
        assert schedule_cost(paged, costs)[0] == pytest.approx(expected)


@given(cost_lists, st.integers(3, 40))
@settings(max_examples=50)
def test_rounded_memory_is_never_exceeded_and_more_of_it_is_never_slower(costs, slots):
    most = 2 * schedule_cost(Schedule.keeping(len(costs)), costs)[1]
    program = DynamicProgram(costs, most, slots)
    for fewer, more in zip(program.seconds, program.seconds[1:], strict=False):
        assert more <= fewer
    for slot, seconds in enumerate(program.seconds):
        if seconds < float("inf"):
            found, peak = schedule_cost(program.schedule(slot), costs)
            assert found == pytest.approx(seconds) and peak <= slot * program.slot


@given(cost_lists)
@settings(max_examples=50)
def test_splits_into_segments_are_never_faster(costs):
    """The square root's, and every other: the best of them in any sense is among them."""
    count = len(costs)
    splits = [schedule_cost(split, costs) for split in (at_the_square_root(count), *every_split(count))]
    most = max(peak for _, peak in splits)
    program = DynamicProgram(costs, most, slots=most)
    assert all(program.seconds[peak] <= seconds for seconds, peak in splits)


@given(cost_lists)
@settings(max_examples=50)
def test_a_frontier_ends_in_plain_backpropagation(costs):
    found = frontier(costs)
    found_costs = [schedule_cost(schedule, costs) for schedule in found]
    assert found[-1] == Schedule.keeping(len(costs))
    assert found_costs[-1][0] == sum(each.forward_seconds + each.backward_seconds for each in costs)
    assert found_costs == sorted(found_costs, key=lambda each: -each[0])
    assert [peak for _, peak in found_costs] == sorted(peak for _, peak in found_costs)
    few = subsample(found, costs, 3)
    assert len(few) <= 5 and few[0] == found[-1] and few[-1] == found[0]


def test_equal_units_need_the_square_root_or_less():
    costs = [unit_cost(1.0, 4, 0, 0, 0, 4) for _ in range(16)]
    plain, least = schedule_cost(Schedule.keeping(16), costs)[1], schedule_cost(frontier(costs)[0], costs)[1]
    assert least < schedule_cost(at_the_square_root(16), costs)[1] < plain


def test_a_feature_map_larger_than_what_it_frees_is_not_kept():
    wide = [unit_cost(1.0, 100, 1, 0, 0, 0) for _ in range(3)]
    assert schedule_cost(frontier(wide)[-1], wide)[1] == schedule_cost(Schedule.keeping(3), wide)[1]


def test_schedules_print_and_parse_back():
    for parts in every_schedule(0, 4):
        assert Schedule.parse(str(Schedule(parts))) == Schedule(parts)


def test_text_of_a_schedule():
    nested = Schedule((Schedule((Schedule((0, 1)), 2, 3)), 4, 5, 6))
    assert str(nested) == "((0-1) 2-3) 4-6" and nested.recomputes and list(nested.units) == [*range(7)]
    assert str(Schedule.keeping(1)) == "0" and not Schedule.keeping(1).recomputes


@pytest.mark.parametrize(
    "text", ["", "1", "0 2", "0-", "(0-1", "0) 1", "() 0", "0 0", "zero", "1-0", "0-1 x", "(0 (2)) 1"]
)
def test_other_text_is_refused(text):
    with pytest.raises(UsageError, match="is no schedule"):
        Schedule.parse(text)
