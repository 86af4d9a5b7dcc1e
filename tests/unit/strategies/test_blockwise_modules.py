"""Partitions into gradient-isolated modules, against brute force."""

import random
from itertools import combinations, pairwise

import pytest

from snugfit.strategies.blockwise.modules import (
    ModuleCosts,
    all_partitions,
    balanced_sizes,
    module_counts,
    partitions_of,
)
from snugfit.strategies.recomputation.dynamic_program import UnitCost, schedule_cost
from snugfit.strategies.recomputation.schedule import Schedule


def random_cost(draw):
    output = draw.randint(1, 40)
    saved = output + draw.randint(0, 60)
    discarding, backward = output + draw.randint(0, 20), saved + output + draw.randint(0, 30)
    return UnitCost(draw.randint(1, 9), draw.randint(1, 20), output, saved, discarding, saved + 5, backward)


def random_costs(seed, units=6):
    draw = random.Random(seed)
    sizes = [[draw.randint(1, 100) for _ in range(units)] for _ in range(3)]
    return ModuleCosts([random_cost(draw) for _ in range(units)], [random_cost(draw) for _ in range(units)], *sizes)


def divisions(units, modules):
    for cuts in combinations(range(1, units), modules - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, units)))


def peak(costs, sizes):
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    found = []
    for size, end in zip(sizes, ends, strict=True):
        own = [*costs.units[end - size : end], costs.losses[end - 1]]
        fixed = sum(costs.kept_bytes[end - size : end]) + costs.loss_kept_bytes[end - 1] + costs.input_bytes[end - size]
        found.append(fixed + schedule_cost(Schedule.keeping(len(own)), own)[1])
    return max(found)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("modules", [1, 2, 3, 5, 6])
def test_the_largest_module_is_as_small_as_in_the_best_of_all_divisions(seed, modules):
    costs = random_costs(seed)
    sizes = balanced_sizes(costs, modules)
    assert (len(sizes), sum(sizes)) == (modules, 6)
    assert peak(costs, sizes) == min(peak(costs, each) for each in divisions(6, modules))


@pytest.mark.parametrize("seed", range(20))
def test_recomputation_lowers_the_peak_and_stays_within_its_module(seed):
    costs = random_costs(seed, units=8)
    for modules in (1, 2, 3):
        found = partitions_of(costs, modules)
        assert found[0].schedules == ("",) * modules
        peaks = [max(each.step_bytes) for each in found]
        assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
        for each in found:
            for (first, last), text, size in zip(each.spans, each.schedules, each.step_bytes, strict=True):
                count = last - first + 1
                schedule = Schedule.parse(text) if text else Schedule.keeping(count)
                assert list(schedule.units) == list(range(count))
                assert costs.step_bytes(first, last, Schedule((*schedule.parts, count))) == size


def test_the_partitions_go_from_one_module_to_one_per_unit():
    assert module_counts(1) == [1]
    assert module_counts(5) == [1, 2, 3, 4, 5]
    assert module_counts(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    found = all_partitions(random_costs(1, units=7))
    counts = [len(each.sizes) for each in found]
    assert counts == sorted(counts) and set(counts) == {1, 2, 3, 4, 6, 7}
    assert found[-1].schedules == ("",) * 7 and counts.count(7) == 1
