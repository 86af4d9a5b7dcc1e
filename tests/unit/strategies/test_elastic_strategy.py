"""What ``elastic`` proposes, predicts and asks for, from made-up profiles."""

import math
from dataclasses import replace

import numpy as np
import pytest
from elastic_samples import elastic_profile, tensor_profile, whole_steps
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from strategy_samples import HARDWARE, MB, line, workload
from torch import nn

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.profile import Profile
from snugfit._core.workload import OptimizerSettings
from snugfit.errors import InfeasibleBudgetError, InfeasibleTimeError
from snugfit.selection.choice import choose
from snugfit.strategies.elastic.budgets import budget_for, importance_peak, largest_chunk, nothing_selected
from snugfit.strategies.elastic.probes import FULL, HEAD, IMPORTANCE
from snugfit.strategies.elastic.strategy import Elastic

WORK = workload(batch_size=8)
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)


def proposal(strategy=None, profile=None, work=WORK, **budget):
    profile = elastic_profile() if profile is None else profile
    return next((strategy or Elastic()).propose(work, profile, HARDWARE, Budget(**budget)), None)


def lack(strategy=None, profile=None, work=WORK, **budget):
    profile = elastic_profile() if profile is None else profile
    return (strategy or Elastic()).shortfall(work, profile, HARDWARE, Budget(**budget))


def selection(found, profile, work=WORK, importance=None):
    """What it would select, with importances as given or all alike."""
    costs = found.costs(work, profile)
    values = np.ones(len(costs.memory.names)) if importance is None else importance
    return costs, choose(costs.times, costs.memory, values, costs.headroom(found.budget, found.time_ratio))


def test_the_whole_batch_at_the_asked_ratio():
    found = proposal(time_ratio=0.7)
    assert (found.micro_batch, found.micro_batches, found.chunk, found.time_ratio) == (8, 1, 4, 0.7)
    assert found.budget == Budget(None, None, 0.7)
    assert proposal(time_ratio=None).time_ratio == 0.5
    fixed = proposal(Elastic(scheme="full"))
    assert fixed.time_ratio is None and (fixed.micro_batch, fixed.chunk) == (8, 1)


def test_nothing_without_a_profile_of_tensors():
    assert proposal(profile=replace(elastic_profile(), tensors=None)) is None
    assert proposal(profile=elastic_profile(without=[HEAD])) is None
    assert proposal(profile=elastic_profile(without=[IMPORTANCE])) is None
    assert proposal(Elastic(scheme="head"), elastic_profile(without=[IMPORTANCE])) is not None


def test_a_ratio_that_is_too_small_names_the_smallest():
    assert proposal(time_ratio=0.2) is None
    told = lack(time_ratio=0.2)
    assert told.smallest_bytes is None and 0.2 < told.smallest_ratio < 0.6
    assert "0.2" in told.reasons[0] and f"{told.smallest_ratio:.3f}" in told.reasons[0]
    assert proposal(time_ratio=round(told.smallest_ratio - 0.001, 3)) is None


@settings(max_examples=25, deadline=None, phases=NO_SHRINKING)
@given(
    st.integers(1, 5), st.floats(1e-5, 1e-1), st.booleans(), st.integers(1, 64),
    st.floats(0.05, 0.95), st.floats(0.3, 3),
)  # fmt: skip
def test_the_smallest_ratio_works(count, seconds, measured, batch_size, share, speed):
    steps = whole_steps(share * seconds, seconds, speed * seconds) if measured else None
    profile = elastic_profile(tensor_profile(steps, convolutions=count, seconds=seconds / 10))
    work = workload(batch_size=batch_size)
    smallest = Elastic().smallest_ratio(work, profile)
    if smallest > 1:
        told = lack(profile=profile, work=work, time_ratio=1.0)
        assert told.smallest_ratio is None and "backprop" in told.reasons[0]
        return
    if smallest > 0.002:
        assert lack(profile=profile, work=work, time_ratio=smallest - 0.0015).smallest_ratio == smallest
    found = proposal(profile=profile, work=work, time_ratio=smallest)
    costs, mask = selection(found, profile, work)
    assert (mask & ~costs.memory.head).any()
    assert costs.times.ratio(mask) <= smallest * (1 + 1e-6)


@settings(max_examples=25, deadline=None, phases=NO_SHRINKING)
@given(
    st.floats(0.45, 1), st.integers(1, 5), st.integers(1, 64), st.booleans(), st.integers(0, 20 * MB),
    st.integers(11 * MB, 300 * MB), st.integers(100, 3 * MB), st.integers(1000, 10 * MB), st.data(),
)  # fmt: skip
def test_selections_keep_to_both_budgets_and_the_prediction(
    ratio, count, batch_size, accumulate, base, memory, map_bytes, parameters, data
):
    profile = elastic_profile(
        tensor_profile(whole_steps(), convolutions=count, map_bytes=map_bytes, parameters=parameters), base
    )
    work = workload(batch_size=batch_size)
    found = proposal(Elastic(accumulate=accumulate), profile, work, time_ratio=ratio, memory=memory)
    if found is None:
        told = lack(Elastic(accumulate=accumulate), profile, work, time_ratio=ratio, memory=memory)
        assert (told.smallest_ratio or 0) > ratio or told.smallest_bytes > memory
        return
    cost = found.estimate(work, profile, HARDWARE)
    assert cost.peak_bytes <= memory, "or it would be refused after all"
    assert importance_peak(profile, found.chunk) <= cost.peak_bytes
    size = 2 * count + 2
    values = np.array(data.draw(st.lists(st.floats(0.01, 10), min_size=size, max_size=size)))
    costs, mask = selection(found, profile, work, values)
    assert (mask & ~costs.memory.head).any() and mask[costs.memory.head].all()
    assert costs.times.ratio(mask) <= ratio * (1 + 1e-6)
    assert costs.predicted_peak(mask) <= cost.peak_bytes


@pytest.mark.parametrize("scheme", ["elastic", "full", "head", "bn+bias"])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_budget_that_is_named_works(scheme, accumulate, optimizer):
    profile = elastic_profile(tensor_profile(whole_steps(), map_bytes=2 * MB, parameters=MB), base=3 * MB)
    strategy = Elastic(scheme=scheme, accumulate=accumulate)
    work = workload(batch_size=16, optimizer=OptimizerSettings(optimizer))
    ratio = 0.6 if scheme == "elastic" else None
    told = lack(strategy, profile, work, memory="12MB", time_ratio=ratio)
    assert told.smallest_bytes > 12 * MB and told.smallest_ratio is None
    found = proposal(strategy, profile, work, memory=told.smallest_bytes, time_ratio=ratio)
    assert found is not None and found.estimate(work, profile, HARDWARE).peak_bytes <= told.smallest_bytes
    assert proposal(strategy, profile, work, memory=told.smallest_bytes - 5 * MB, time_ratio=ratio) is None


@pytest.mark.parametrize(("scheme", "floor"), [("elastic", 40), ("head", 5), ("full", 60), ("bn+bias", 60)])
def test_a_network_that_could_not_be_measured_goes_by_its_floor(scheme, floor):
    profile = Profile((), {}, {HEAD: 5 * MB, FULL: 60 * MB, IMPORTANCE: 40 * MB}, base_bytes=2 * MB)
    told = lack(Elastic(scheme=scheme), profile, memory="4MB")
    assert told.smallest_bytes == math.ceil((2 + floor * 1.12) * 1.015 + 2.5 + 7) * MB
    assert lack(Elastic(scheme=scheme), profile, memory="900MB").smallest_bytes == 901 * MB


def test_memory_makes_the_micro_batch_smaller_before_it_makes_selections_so():
    profile = elastic_profile(tensor_profile(whole_steps(), map_bytes=8 * MB), sample=8 * MB)
    free = proposal(profile=profile, time_ratio=0.9)
    bound = proposal(profile=profile, time_ratio=0.9, memory=free.estimate(WORK, profile, HARDWARE).peak_bytes // 2)
    assert (free.micro_batch, free.micro_batches) == (8, 1)
    assert bound.micro_batch < 8 and bound.micro_batch * bound.micro_batches == 8
    tight = proposal(profile=profile, time_ratio=0.9, memory="40MB")
    assert tight.micro_batch < bound.micro_batch and tight.chunk == 2, "the ranking pass, too"


def test_without_accumulation_steps_are_smaller():
    profile = elastic_profile(tensor_profile(whole_steps(), map_bytes=8 * MB), sample=8 * MB)
    found = proposal(Elastic(accumulate=False), profile, time_ratio=0.9, memory="60MB")
    assert found.micro_batches == 1 and 1 <= found.micro_batch < 8


def test_chunks_divide_the_ranking_batch():
    profile = elastic_profile(sample=10 * MB)
    assert largest_chunk(profile, Budget(), (1, 2, 4)) == 4
    assert largest_chunk(profile, Budget("40MB"), (1, 2, 4)) == 2
    assert largest_chunk(profile, Budget("20MB"), (1, 2, 4)) == 0
    assert largest_chunk(elastic_profile(without=[IMPORTANCE]), Budget(), (1, 2, 4)) == 0


def test_seconds_are_those_of_the_ratio():
    """125 steps of 8 images at 0.7 of the 14 ms that a full one takes, 200 images of validation, 40 ms of ranking."""
    found, profile = proposal(time_ratio=0.7), elastic_profile()
    cost = found.estimate(workload(batch_size=8, epochs=7), profile, HARDWARE)
    assert cost.seconds_per_epoch == pytest.approx(0.7 * 14e-3 * (125 + 0.3 * 200 / 8))
    assert [phase.name for phase in cost.phases] == ["interval 1", "interval 2", "interval 3"]
    assert sum(phase.seconds for phase in cost.phases) == pytest.approx(cost.seconds)
    assert cost.phases[2].seconds == pytest.approx(cost.seconds_per_epoch + 0.04) and cost.phases[0].batch_size == 8


def test_schemes_that_select_nothing_have_one_interval():
    assert Elastic(scheme="full").spans(7) == [range(7)]
    assert Elastic(interval=2).spans(5) == [range(2), range(2, 4), range(4, 5)]
    assert Elastic().spans(2) == [range(2)]


def test_schemes_cost_more_the_more_they_train():
    profile = elastic_profile(tensor_profile(whole_steps(), map_bytes=MB, parameters=MB))
    costs = [
        proposal(Elastic(scheme=s), profile).estimate(WORK, profile, HARDWARE) for s in ("head", "bn+bias", "full")
    ]
    seconds, peaks = [cost.seconds for cost in costs], [cost.peak_bytes for cost in costs]
    assert seconds == sorted(set(seconds)) and peaks == sorted(set(peaks))
    assert seconds[2] == pytest.approx(3 * 12e-3 * (125 + 7.5))


def reasons(module, strategy=None, **optimizer):
    chain = Chain.from_module(module, (1, 8, 8), "net")
    work = workload(optimizer=OptimizerSettings(**optimizer))
    return (strategy or Elastic()).validate(work, chain, HARDWARE)


def net(*trains):
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    for index in (0, 4):
        module[index].requires_grad_(index in trains)
    return module


def test_who_can_be_served():
    assert reasons(net(0, 4)) == reasons(net(0, 4), name="adamw") == reasons(net(4), Elastic(scheme="head")) == []
    (frozen,) = reasons(net())
    assert "nothing to select" in frozen


def test_a_network_with_nothing_beside_the_classifier_is_told_of_the_scheme_for_it():
    (only,) = reasons(net(4))
    assert "--scheme head" in only


def values(profile, **named):
    names = [part.name for part in profile.tensors.tensors]
    return np.array([named.get(name.replace(".", "_"), -1.0) for name in names])


def test_an_empty_selection_says_which_of_worth_time_and_memory_lacks():
    profile = elastic_profile(tensor_profile(whole_steps(), map_bytes=3 * MB, parameters=MB))
    costs = proposal(profile=profile, time_ratio=0.6).costs(WORK, profile)
    error = nothing_selected(costs, Budget(time_ratio=0.6), values(profile, head_weight=1.0))
    assert isinstance(error, InfeasibleTimeError) and error.smallest_ratio is None
    assert "--lr" in str(error) and "--scheme head" in str(error)
    deep = values(profile, conv0_weight=1.0)
    error = nothing_selected(costs, Budget(time_ratio=0.6), deep)
    assert isinstance(error, InfeasibleTimeError) and 0.6 < error.smallest_ratio <= 0.86
    _, mask = selection(proposal(profile=profile, time_ratio=error.smallest_ratio), profile, importance=deep)
    assert mask[0], "the ratio that it names works"
    error = nothing_selected(costs, Budget("20MB", time_ratio=0.9), deep)
    assert isinstance(error, InfeasibleBudgetError) and error.smallest_bytes > 20 * MB
    assert error.lacking_bytes == error.smallest_bytes - 20 * MB


def test_a_named_budget_lies_above_the_one_that_was_refused():
    assert budget_for(20 * MB, None) == budget_for(20 * MB, 10 * MB) == 27 * MB
    assert budget_for(20 * MB, 50 * MB) == 51 * MB


def test_a_ranking_pass_that_was_measured_at_two_images_takes_no_single_one():
    """A line through one point says nothing of fewer images."""
    profile = elastic_profile(sample=10 * MB)
    lines = profile.lines | {IMPORTANCE: line(0, 20 * MB, smallest=2)}
    profile = replace(profile, lines=lines)
    assert largest_chunk(profile, Budget("60MB"), (1, 2, 4)) == 2
    assert largest_chunk(profile, Budget("40MB"), (1, 2, 4)) == 0
    told = lack(profile=profile, memory="40MB", time_ratio=0.9)
    assert told.smallest_bytes == budget_for(importance_peak(profile, 2), None)
    assert proposal(profile=profile, memory=told.smallest_bytes, time_ratio=0.9).chunk == 2
