"""Partitions into gradient-isolated modules, against brute force."""

import copy
import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch

from snugfit._chain import Chain
from snugfit._core.profile import ProbeLine
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._models import build
from snugfit._training.network import NetworkTrainer
from snugfit.local.assignment import Layout
from snugfit.strategies.blockwise.modules import (
    ModuleCosts,
    Partition,
    PartitionFilter,
    all_partitions,
    balanced_sizes,
    even_modules,
    fastest_divisions,
    module_counts,
    partitions_of,
)
from snugfit.strategies.blockwise.strategy import Blockwise
from snugfit.strategies.blockwise.worker import BlockTrainer, LocalUnit, Recomputation, initialise_loss
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


@pytest.mark.parametrize("seed", range(30))
def test_divisions_into_measured_modules_are_the_fastest_of_all(seed):
    draw = random.Random(seed)
    units = draw.randint(1, 6)
    every = [(first, last, "") for first in range(units) for last in range(first, units)]
    seconds = {module: draw.randint(1, 9) for module in every if draw.random() < 0.6}
    found = {len(division): sum(map(seconds.get, division)) for division in fastest_divisions(units, seconds)}
    expected = {}
    for count in range(1, units + 1):
        for sizes in divisions(units, count):
            ends = [sum(sizes[: index + 1]) for index in range(count)]
            division = [(end - size, end - 1, "") for end, size in zip(ends, sizes, strict=True)]
            if all(module in seconds for module in division):
                expected[count] = min(expected.get(count, 999), sum(map(seconds.get, division)))
    assert found == expected


def test_modules_of_one_size_cover_the_network():
    assert even_modules(5, 2) == ((0, 1, ""), (2, 3, ""), (4, 4, ""))
    assert even_modules(3, 9) == ((0, 2, ""),)


def line(name, sample_bytes):
    return ProbeLine(name, 0.0, float(sample_bytes), 0.0, 0.0, 1.0)


def test_modules_are_measured_from_the_fewest_on_until_a_division_fits():
    partitions = [
        Partition((2,), ("",), (300_000_000,)),
        Partition((1, 1), ("", ""), (90_000_000, 90_000_000)),
        Partition((1, 1), ("", "0"), (90_000_000, 50_000_000)),
    ]
    judge = PartitionFilter(partitions, [["all"], ["a", "b"], ["a", "b 0"]], batch=10)

    def wanted(tried, available):
        return [name for name in ("all", "a", "b", "b 0") if judge.is_worth_measuring(name, tried, available)]

    assert wanted({}, float("inf")) == ["all"]
    assert wanted({}, 150e6) == ["a", "b"]  # one module would need 300 MB
    fits, too_much = line("a", 9_000_000), line("b", 15_000_000)
    assert wanted({"a": fits}, 150e6) == ["b"]
    assert wanted({"a": fits, "b": fits}, 150e6) == []
    for failed in (None, too_much):
        assert wanted({"a": fits, "b": failed}, 150e6) == ["b 0"]
    assert wanted({"a": None}, 150e6) == ["b 0"]  # the last partition is measured in any case


def trained(schedule, chain, work, dtype=torch.float64):
    """Weights after two steps of one module of all units, from the same start and on the same images."""
    clone = copy.deepcopy(chain)
    layout = Blockwise()._layout(clone, work, even_modules(len(clone.units), len(clone.units)))
    recomputation = None
    if schedule:
        recomputation = Recomputation([unit.module for unit in clone.units], Schedule.parse(schedule))
    local = LocalUnit(layout.modules[0].module, layout.make_loss(0), work, recomputation)
    for images, labels in batches(dtype):
        local.step(images, labels)
    return clone.to_module().state_dict()


WORKLOAD = Workload("m", "d", (3, 16, 16), 10, 8, 1, 1, optimizer=OptimizerSettings("sgd", 0.1))


def batches(dtype):
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        images = torch.randn(8, 3, 16, 16, generator=generator, dtype=dtype)
        yield images, torch.randint(0, 10, (8,), generator=generator)


def initial_chain(name, dtype=torch.float64):
    torch.manual_seed(0)
    return Chain.from_module(build(name, 10, 16).to(dtype), (3, 16, 16))


@pytest.mark.parametrize(("name", "smoothing"), [("resnet18", 0.0), ("smallconv", 0.0), ("smallconv", 0.2)])
def test_one_module_is_backpropagation(name, smoothing):
    chain, work = initial_chain(name), replace(WORKLOAD, label_smoothing=smoothing)
    module = copy.deepcopy(chain).to_module()
    trainer = NetworkTrainer(module, module, work)
    for images, labels in batches(torch.float64):
        trainer.step(images, labels)
    found = trained("", chain, work)
    for key, value in module.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)


def test_a_module_that_runs_units_again_computes_the_same():
    chain = initial_chain("resnet18")
    plain, recomputed = (trained(each, chain, WORKLOAD) for each in ("", "((0-2) 3) (4-6) 7-8"))
    for key, value in plain.items():
        torch.testing.assert_close(recomputed[key], value, rtol=1e-10, atol=1e-12)


def test_no_gradient_crosses_from_a_module_to_the_one_before_it():
    """Another head changes what the last module learns, and nothing before it."""
    chain = initial_chain("smallconv", torch.float32)
    results = []
    for scale in (1.0, 3.0):
        clone = copy.deepcopy(chain)
        with torch.no_grad():
            for parameter in clone.head.module.parameters():
                parameter.mul_(scale)
        layout = Layout.of(clone, "aan", 10, [2, len(clone.units) - 2])
        first, last = layout.make_loss(0), layout.make_loss(1)
        initialise_loss(first, 1)
        pairs = zip(layout.modules, (first, last), strict=True)
        trainer = BlockTrainer([LocalUnit(module.module, loss, WORKLOAD) for module, loss in pairs])
        for images, labels in batches(torch.float32):
            trainer.step(images, labels)
        results.append([unit.module.state_dict() for unit in clone.units])
    same = [all(torch.equal(one[key], other[key]) for key in one) for one, other in zip(*results, strict=True)]
    assert same[:2] == [True, True] and not any(same[2:])
