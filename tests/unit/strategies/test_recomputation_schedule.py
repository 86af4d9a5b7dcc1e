"""The dynamic programme against all schedules, and schedules as text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_samples import at_the_square_root, every_schedule, every_split

from snugfit.errors import UsageError
from snugfit.strategies.checkpoint.candidates import frontier, thinned
from snugfit.strategies.checkpoint.dynamic_program import Programme, Stage, price
from snugfit.strategies.checkpoint.schedule import Schedule


def stage(forward, output, kept, passing, saving, returning):
    """A unit that could exist: what it takes is at least what it gives, keeps and is given."""
    saved = output + kept
    return Stage(forward, 2 * forward, output, saved, output + passing, saved + saving, saved + returning)


small = st.integers(0, 4)
stages_lists = st.lists(
    st.builds(stage, st.integers(1, 5).map(float), st.integers(1, 5), small, small, small, small),
    min_size=1,
    max_size=5,
)


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


def simulate(schedule, stages):
    """Seconds and peak, by keeping account of every map and gradient."""
    seconds, peak, last = 0.0, 0, len(stages) - 1
    maps, saved, gradient = {-1}, set(), last  # outputs in memory; of units whose backward pass is prepared; whose
    size = [each.output for each in stages]

    def alive():
        loose = {unit for unit in maps - saved if unit >= 0}
        return sum(stages[unit].saved for unit in saved) + sum(size[unit] for unit in loose)

    kept_inputs = {0}
    for operation, unit in operations(schedule, last):
        own = stages[unit]
        if operation == "keep input":
            kept_inputs.add(unit)
        elif operation == "back":
            seconds += own.backward
            saved.discard(unit)
            maps.discard(unit)
            peak = max(peak, alive() + own.returning)
            maps.discard(unit - 1)
            gradient = unit - 1
        else:
            most = own.passing if operation == "pass" else own.saving
            peak = max(peak, alive() + size[gradient] + most)
            seconds += own.forward
            maps.add(unit)
            if operation == "save":
                saved.add(unit)
            if operation == "pass" and unit not in kept_inputs:
                maps.discard(unit - 1)
    return seconds, peak


@given(stages_lists)
@settings(max_examples=25)
def test_no_schedule_is_faster_in_the_same_memory(stages):
    priced = [price(Schedule(parts), stages) for parts in every_schedule(0, len(stages) - 1)]
    most = max(peak for _, peak in priced)
    programme = Programme(stages, most, slots=most)
    assert programme.slot == 1
    for limit in range(most + 1):
        best = min((seconds for seconds, peak in priced if peak <= limit), default=float("inf"))
        assert programme.seconds[limit] == best
        if best < float("inf"):
            seconds, peak = price(programme.schedule(limit), stages)
            assert seconds == best and peak <= limit
        else:
            with pytest.raises(ValueError, match="no schedule fits"):
                programme.schedule(limit)


@given(stages_lists)
@settings(max_examples=25)
def test_the_price_is_what_an_account_of_every_map_comes_to(stages):
    for parts in every_schedule(0, len(stages) - 1):
        assert price(Schedule(parts), stages) == pytest.approx(simulate(Schedule(parts), stages)), str(Schedule(parts))


@given(stages_lists, st.integers(3, 40))
@settings(max_examples=50)
def test_rounded_memory_is_never_exceeded_and_more_of_it_is_never_slower(stages, slots):
    most = 2 * price(Schedule.keeping(len(stages)), stages)[1]
    programme = Programme(stages, most, slots)
    for fewer, more in zip(programme.seconds, programme.seconds[1:], strict=False):
        assert more <= fewer
    for slot, seconds in enumerate(programme.seconds):
        if seconds < float("inf"):
            found, peak = price(programme.schedule(slot), stages)
            assert found == pytest.approx(seconds) and peak <= slot * programme.slot


@given(stages_lists)
@settings(max_examples=50)
def test_splits_into_segments_are_never_faster(stages):
    """The square root's, and every other: the best of them in any sense is among them."""
    count = len(stages)
    splits = [price(split, stages) for split in (at_the_square_root(count), *every_split(count))]
    most = max(peak for _, peak in splits)
    programme = Programme(stages, most, slots=most)
    assert all(programme.seconds[peak] <= seconds for seconds, peak in splits)


@given(stages_lists)
@settings(max_examples=50)
def test_a_frontier_ends_in_plain_backpropagation(stages):
    found = frontier(stages)
    priced = [price(schedule, stages) for schedule in found]
    assert found[-1] == Schedule.keeping(len(stages)) and priced[-1][0] == sum(s.forward + s.backward for s in stages)
    assert priced == sorted(priced, key=lambda each: -each[0])
    assert [peak for _, peak in priced] == sorted(peak for _, peak in priced)
    few = thinned(found, stages, 3)
    assert len(few) <= 5 and few[0] == found[-1] and few[-1] == found[0]


def test_equal_units_need_the_square_root_or_less():
    stages = [stage(1.0, 4, 0, 0, 0, 4) for _ in range(16)]
    plain, least = price(Schedule.keeping(16), stages)[1], price(frontier(stages)[0], stages)[1]
    assert least < price(at_the_square_root(16), stages)[1] < plain


def test_a_map_dearer_than_what_it_frees_is_not_kept():
    wide = [stage(1.0, 100, 1, 0, 0, 0) for _ in range(3)]
    assert price(frontier(wide)[-1], wide)[1] == price(Schedule.keeping(3), wide)[1]


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
