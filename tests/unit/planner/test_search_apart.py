"""Strategies that are measured in processes of their own."""

import sys

import pytest
from search_samples import MB, Growing, by_base, made_up, searched

from snugfit.errors import ModelError


def apart(*strategies, **more):
    """What a search finds that measures every strategy in a process of its own."""
    return searched(*strategies, meter=Growing(), new_meter=Growing, **more)


def test_a_strategy_that_is_measured_apart_has_all_memory_that_others_would_leave():
    """Together the second one finds 30 MB taken; and its own measurements leave none in the process that trains."""
    strategies = [by_base("a", 90, slower=True), by_base("backprop", 80), by_base("b", 60, slower=True)]
    together = searched(*strategies, meter=Growing())
    assert [each.strategy for each in together.plan.candidates if each.feasible] == ["b"] and not together.apart
    told = []
    found = apart(*strategies, told=told)
    assert found.apart and not found.fresh and not found.may_fit_alone
    assert [name for name, *_ in told] == ["a-probe", "backprop-probe", "b-probe"]
    choice = found.plan.choice
    assert (choice.strategy, choice.settings["setting"]) == ("backprop", 80)
    assert found.profile.base_bytes < 5 * MB and found.profile.units
    assert set(found.profile.floors) == {"a-probe", "backprop-probe", "b-probe"}, "trials estimate the others"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_what_is_measured_apart_does_not_depend_on_the_order(order):
    strategies = [by_base("a", 20, 40, 60), by_base("backprop", 10, 50, 95), by_base("checkpoint", 30, 99)]
    found = apart(*(strategies[place] for place in order))
    told = {each.strategy: (each.feasible, each.settings, each.predicted) for each in found.plan.candidates}
    again = {
        each.strategy: (each.feasible, each.settings, each.predicted) for each in apart(*strategies).plan.candidates
    }
    assert told == again and len(told) == 3


@pytest.mark.parametrize("successes", [0, 1])
def test_if_a_process_fails_all_strategies_are_measured_in_this_one(monkeypatch, successes):
    """None of them keeps a prediction for a process that has measured nothing."""
    run_forked, forks = sys.modules["snugfit._planner.search"].run_forked, []

    def refuse(work, on_message):
        forks.append(work)
        if len(forks) > successes:
            raise ChildProcessError("the system refused to fork")
        return run_forked(work, on_message)

    monkeypatch.setattr(sys.modules["snugfit._planner.search"], "run_forked", refuse)
    strategies = [by_base("a", 20, 40), by_base("backprop", 10, 50)]
    found, here = apart(*strategies), searched(*strategies, meter=Growing())
    assert len(forks) == successes + 1 and not found.apart and not found.fresh
    assert found.plan.candidates == here.plan.candidates and found.profile.base_bytes == here.profile.base_bytes


def test_the_error_of_the_only_strategy_is_raised_here(monkeypatch):
    strategy = made_up("a", [(1, 1, 0)])

    def refuse(self, workload, chain, hardware):
        raise ModelError("the network has no such layer.")

    type(strategy).validate = refuse
    with pytest.raises(ModelError, match="no such layer"):
        apart(strategy)
    plan = apart(strategy, made_up("b", [(1 * MB, 1, 0)])).plan
    assert {each.strategy: each.reasons for each in plan.candidates}["a"] == ("the network has no such layer.",)
