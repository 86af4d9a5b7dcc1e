"""The search on made-up strategies: ranking, reasons, and the error where nothing fits."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import search_samples
from search_samples import BUDGET, HARDWARE, MB, WORKLOAD, Growing, Still, by_base, made_up, run, searched

from snugfit._core.budget import Budget
from snugfit._core.plan import Candidate, Cost, Phase, Plan, Shortfall
from snugfit._core.profile import Profile, UnitStats
from snugfit._planner import PastRun, infeasible_error
from snugfit._planner.candidates import norm_images
from snugfit._planner.probe_keys import identified


class Clock:
    """Ten seconds pass between any two looks."""

    seconds = 0.0

    def __call__(self):
        self.seconds += 10
        return self.seconds


NAMES = ("backprop", "checkpoint", "blockwise", "elastic")


@pytest.mark.parametrize(("seconds", "measured"), [(None, 4), (100, 4), (25, 3), (15, 2), (1, 2)])
def test_strategies_are_left_out_once_time_is_over_and_something_fits(monkeypatch, seconds, measured):
    """Nothing of the first one fits, so that the second one is always measured."""
    monkeypatch.setattr(sys.modules["snugfit._planner.search"], "time", SimpleNamespace(monotonic=Clock()))
    first = made_up(NAMES[0], reasons=["too large"], smallest=200 * MB)
    others = [made_up(name, [(50 * MB, number, 0)]) for number, name in enumerate(NAMES[1:], start=1)]
    resort = made_up("tiled", [(1 * MB, 1, 0)], exact=True)
    plan, profile = run(
        first, *others, profile_seconds=seconds, standby=[resort] if measured < 4 else [], aim="accuracy"
    )
    assert set(profile.floors) == {f"{name}-probe" for name in NAMES[:measured]}
    late = {each.strategy: each.reasons for each in plan.candidates if not each.considered}
    assert late == dict.fromkeys(
        [*NAMES[measured:], "tiled"] if measured < 4 else [], ("not measured: --profile-time was over",)
    )
    assert plan.choice.strategy == NAMES[1] and {each.strategy for each in plan.candidates} >= set(NAMES)


def test_a_fresh_process_trains_what_memory_left_by_measuring_has_no_room_for():
    strategies = [by_base("backprop", 20, 60, 80), by_base("b", 10)]
    here = searched(*strategies, meter=Growing())
    assert not here.fresh and here.plan.choice.settings["setting"] == 60
    there = searched(*strategies, meter=Growing(), fresh=True)
    assert there.fresh and there.plan.choice.settings["setting"] == 80 and len(there.plan.candidates) == 2
    assert there.profile.base_bytes < 20 * MB < here.profile.base_bytes == 30 * MB
    assert there.plan.choice.predicted.peak_bytes == there.profile.base_bytes + 80 * MB <= 100 * MB


@pytest.mark.parametrize(
    "changes", [{"fresh": False}, {"budget": Budget()}, {"budget": Budget("100MB", devices=2)}, {"meter": Still()}]
)
def test_training_stays_where_it_was_planned_if_that_changes_nothing_or_cannot_be(changes):
    strategies = [made_up("backprop", [(50 * MB, 9, 0)])]
    assert not searched(*strategies, **{"meter": Growing(), "fresh": True, **changes}).fresh
    steps = by_base("backprop", 60, 80) if changes.get("budget", BUDGET).memory_bytes else strategies[0]
    assert not searched(steps, **{"meter": Growing(), "fresh": True, **changes}).fresh


def test_a_strategy_whose_predictions_do_not_hold_there_stays():
    found = searched(by_base("sidenet", 20, 60, 80), meter=Growing(), fresh=True)
    assert not found.fresh and found.plan.choice.settings["setting"] == 60


def test_settings_of_a_fresh_process_that_are_slower_are_not_taken():
    found = searched(by_base("backprop", 20, 60, 80, slower=True), meter=Growing(), fresh=True)
    assert not found.fresh and found.plan.choice.settings["setting"] == 60


def test_a_fresh_process_with_no_more_room_is_not_started():
    """Where nothing is left behind, the megabyte for starting it would leave less."""
    found = searched(by_base("backprop", 80, 100), meter=Still(), fresh=True)
    assert not found.fresh and found.plan.choice.settings["setting"] == 100


def test_what_fits_in_a_fresh_process_only_is_feasible_and_needs_no_last_resort():
    found = searched(by_base("backprop", 88), meter=Growing(), fresh=True, standby=(made_up("tiled"),))
    assert found.fresh and found.plan.choice.settings["setting"] == 88
    assert "measured only where nothing else fits" in found.plan.candidates[-1].reasons[0]


@pytest.mark.parametrize(
    ("seconds", "smallest", "found"),
    [(600, 165, ("refused",)), (599, 165, ()), (600, 166, ()), (600, None, ())],
)
def test_what_was_refused_is_planned_alone_if_that_is_worth_it(seconds, smallest, found):
    lacking = None if smallest is None else smallest * MB
    refused = made_up("refused", reasons=["too little"], smallest=lacking)
    chosen = made_up("chosen", [(MB, seconds, 0)])
    assert searched(chosen, refused).may_fit_alone == found
    assert searched(chosen, refused, budget=Budget()).may_fit_alone == ()


def test_feasible_ones_first_and_the_fastest_of_them_first():
    plan, _ = run(
        made_up("slow", [(90 * MB, 50, 0)]),
        made_up("huge", [(101 * MB, 1, 0)]),
        made_up("fast", [(99 * MB, 20, 0), (10 * MB, 70, 0)], exact=True),
    )
    assert [(c.strategy, c.feasible, c.settings) for c in plan.candidates] == [
        ("fast", True, {"setting": 0}), ("slow", True, {"setting": 0}), ("fast", True, {"setting": 1}),
        ("huge", False, {"setting": 0}),
    ]  # fmt: skip
    assert plan.choice is plan.candidates[0] and plan.choice.exact and plan.choice.predicted.seconds == 20
    assert (plan.workload, plan.budget, plan.hardware) == (WORKLOAD, Budget("100MB"), HARDWARE)


def test_a_correction_of_backprop_alone_does_not_favour_blockwise_in_one_module():
    twice = PastRun("backprop", WORKLOAD.model, WORKLOAD.input_shape, 10.0, 20.0, 100, 90)
    strategies = [made_up(name, [(90 * MB, 30, 0)], exact=True) for name in ("blockwise", "backprop")]
    plan, _ = run(*strategies, runs=[twice])
    seconds = {each.strategy: each.predicted.seconds for each in plan.candidates}
    assert list(seconds.items()) == [("backprop", 60), ("blockwise", 30)]


def test_what_uses_the_whole_budget_fits():
    plan, _ = run(made_up("a", [(100 * MB, 1, 5 * MB)]), budget=Budget("100MB", "5MB"))
    assert plan.chosen == 0 and plan.choice.reasons == () and plan.choice.smallest_bytes is None


def test_without_limits_everything_fits():
    plan, _ = run(made_up("a", [(10**15, 1, 10**15)]), budget=Budget())
    assert plan.choice.feasible


def test_excess_of_memory_and_storage_is_told_apart():
    plan, _ = run(
        made_up("both", [(101 * MB, 1, 6 * MB)]), made_up("disk", [(50 * MB, 2, 7 * MB)]), budget=Budget("100MB", "5MB")
    )
    both, disk = plan.candidates
    assert both.reasons == ("needs 101.0 MB of memory", "needs 6.0 MB of storage")
    assert disk.reasons == ("needs 7.0 MB of storage",)
    assert (both.smallest_bytes, disk.smallest_bytes) == (101 * MB, None)
    assert plan.choice is None


def test_a_strategy_that_cannot_serve_gives_every_reason():
    plan, profile = run(made_up("odd", refusal=["no conv", "too flat"]), made_up("a", [(1, 1, 0)]))
    odd = plan.candidates[-1]
    assert (odd.strategy, odd.feasible, odd.reasons, odd.predicted) == ("odd", False, ("no conv", "too flat"), None)
    assert "odd-probe" not in profile.floors


def test_a_strategy_that_proposes_nothing_tells_what_it_lacks():
    plan, _ = run(made_up("a", reasons=["one sample needs 120 MB"], smallest=120 * MB, exact=True))
    (only,) = plan.candidates
    assert (only.feasible, only.reasons, only.smallest_bytes) == (False, ("one sample needs 120 MB",), 120 * MB)
    assert only.exact and only.settings == {"setting": -1}


def test_the_profile_holds_lines_and_facts():
    told = []
    _, profile = run(made_up("a", [(1, 1, 0)]), made_up("b", [(1, 2, 0)]), told=told)
    assert set(profile.lines) == {"a-probe", "b-probe"}
    assert [unit.macs for unit in profile.units] == [3 * 2 * 9 * 4, 8 * 2]
    assert told == [("a-probe", 1, 2), ("b-probe", 2, 2)]


def test_the_aim_ranks_and_the_plan_explains():
    fast, lean = made_up("fast", [(90 * MB, 10, 0)]), made_up("lean", [(10 * MB, 50, 0)])
    assert run(fast, lean)[0].choice.strategy == "fast"
    plan, _ = run(fast, lean, aim="memory")
    assert (plan.choice.strategy, plan.aim) == ("lean", "memory") and "lean is chosen" in plan.explanation[0]


@pytest.mark.parametrize(
    ("aim", "changes", "first"),
    [
        ("accuracy", {"pretrained": True}, "elastic"),
        ("time", {"pretrained": True}, "backprop"),
        ("accuracy", {"pretrained": True, "train_count": 5000}, "backprop"),
        ("accuracy", {}, "backprop"),
    ],
)
def test_few_images_are_fine_tuned_by_the_strategy_for_it_and_no_last_resort_is_measured(aim, changes, first):
    workload = replace(WORKLOAD, **{"train_count": 300, **changes})
    exact, tuned = made_up("backprop", [(50 * MB, 5, 0)], exact=True), made_up("elastic", [(60 * MB, 9, 0)])
    plan, _ = run(exact, tuned, aim=aim, workload=workload)
    assert plan.choice.strategy == first
    assert ("300 training images are few" in plan.explanation[0]) == (first == "elastic")
    alone, _ = run(tuned, standby=[made_up("tiled", [(1 * MB, 1, 0)], exact=True)], aim=aim, workload=workload)
    tiled = next(each for each in alone.candidates if each.strategy == "tiled")
    assert tiled.considered == (aim == "accuracy" and first != "elastic")


def test_to_train_only_what_decides_is_measured():
    workload = replace(WORKLOAD, pretrained=True, train_count=300)
    exact, small, large = (
        made_up("backprop", [(50 * MB, 5, 0)], exact=True),
        made_up("elastic", [(60 * MB, 9, 0)]),
        made_up("elastic", [(101 * MB, 9, 0)]),
    )

    def measured(tuned, **settings):
        told = []
        plan, _ = run(exact, tuned, workload=workload, told=told, **{"aim": "accuracy", "compares": False, **settings})
        return plan, [name for name, *_ in told]

    plan, names = measured(small)
    assert (plan.choice.strategy, names) == ("elastic", ["elastic-probe"])
    other = plan.candidates[-1]
    assert (other.strategy, other.considered) == ("backprop", False) and "elastic fits" in other.reasons[0]
    plan, names = measured(large)
    assert (plan.choice.strategy, names) == ("backprop", ["elastic-probe", "backprop-probe"])
    assert measured(small, compares=True)[1] == measured(small, aim="time")[1] == ["backprop-probe", "elastic-probe"]


@pytest.mark.parametrize(("kind", "field"), [("storage", "storage_bytes"), ("host_memory", "host_bytes")])
def test_what_pages_too_much_names_how_much_it_needs(kind, field):
    class Paging(type(made_up("a", [(50 * MB, 1, 0)]))):
        def estimate(self, workload, profile, hardware):
            return replace(super().estimate(workload, profile, hardware), **{field: 70 * MB})

    plan, _ = run(Paging(), budget=replace(BUDGET, **{kind: "60MB"}))
    assert plan.choice is None and plan.candidates[0].reasons == (f"needs 70.0 MB of {kind.replace('_', ' ')}",)
    error = infeasible_error(plan)
    assert (error.smallest_bytes, error.lacking_bytes) == (70 * MB, 10 * MB)


def test_what_is_left_out_has_a_row_but_no_say():
    plan, profile = run(made_up("a", reasons=["x"], smallest=120 * MB), left_out={"feedback": "to compare with"})
    last = plan.candidates[-1]
    assert (last.strategy, last.considered, last.reasons) == ("feedback", False, ("to compare with",))
    assert "feedback" not in str(infeasible_error(plan)) and set(profile.floors) == {"a-probe"}


@pytest.mark.parametrize(
    ("others", "aim", "asked"),
    [
        ([(50 * MB, 1, 0)], "time", False),
        ([(50 * MB, 1, 0)], "accuracy", True),
        ([(101 * MB, 1, 0)], "time", True),
    ],
)
def test_a_last_resort_is_measured_where_it_is_needed(others, aim, asked):
    told = []
    resort = made_up("tiled", [(60 * MB, 9, 0)], exact=True)
    plan, profile = run(made_up("a", others), standby=[resort], aim=aim, told=told)
    tiled = next(each for each in plan.candidates if each.strategy == "tiled")
    assert tiled.considered == tiled.feasible == asked == ("tiled-probe" in profile.lines)
    assert [name for name, *_ in told].count("a-probe") == 1, "what is known is not measured again"
    assert plan.choice.strategy == ("tiled" if asked else "a")


class OutOfMemory(list):
    """A listener of measured probes that is refused memory."""

    def append(self, event):
        raise MemoryError


def test_memory_that_runs_out_between_two_measurements_leaves_the_floors():
    """The budget holds nothing then, and what would do is told all the same."""
    plan, profile = run(made_up("a", reasons=["one sample needs 120 MB"], smallest=120 * MB), told=OutOfMemory())
    assert profile.floors == {"a-probe": 7} and profile.lines == {}
    assert plan.choice is None and infeasible_error(plan).smallest_bytes == 120 * MB


class Small(Still):
    """A process whose budget holds no probe."""

    budget_bytes = 5


def test_what_a_strategy_needs_does_not_depend_on_the_strategies_planned_with_it(monkeypatch):
    """ResNet-20 in 22 MB: one sample needed 85 MB in a plan of all strategies, and backprop alone trained."""
    monkeypatch.setattr(search_samples, "Still", Small)

    def shortfall(strategy, workload, profile, hardware, budget):
        return Shortfall(("too big",), profile.base_bytes + 7)

    def needing(name):
        strategy = made_up(name)
        monkeypatch.setattr(type(strategy), "shortfall", shortfall)
        return strategy

    together = run(*map(needing, "abcd"), standby=[needing("last")])[0].candidates
    for each in together:
        assert run(needing(each.strategy))[0].candidates[0].smallest_bytes == each.smallest_bytes > 7
    assert len(together) == 5


def infeasible(*candidates, budget=BUDGET):
    return infeasible_error(Plan(WORKLOAD, budget, HARDWARE, candidates))


def lacking(strategy, smallest, reason="too big", **changes):
    return Candidate(strategy, False, reasons=(reason,), smallest_bytes=smallest, **changes)


def test_the_error_names_the_closest():
    error = infeasible(lacking("a", 150 * MB), lacking("b", 120 * MB, "unit x needs 120 MB"), lacking("c", 130 * MB))
    assert (error.closest, error.lacking_bytes, error.smallest_bytes) == ("b (unit x needs 120 MB)", 20 * MB, 120 * MB)
    assert "net on images does not fit a budget of 100.0 MB of memory" in str(error)


def test_the_error_for_want_of_storage():
    costly = Candidate("a", False, {}, Cost(50 * MB, 1, 1, 9 * MB), ("needs 9.0 MB of storage",))
    error = infeasible(costly, lacking("b", 120 * MB), budget=Budget("100MB", "5MB"))
    assert (error.closest, error.lacking_bytes, error.smallest_bytes) == (
        "a (needs 9.0 MB of storage)", 4 * MB, 9 * MB,
    )  # fmt: skip
    assert infeasible(costly, budget=Budget(storage="5MB")).lacking_bytes == 4 * MB


def test_a_candidate_that_lacks_both_is_measured_by_its_memory():
    greedy = Candidate("a", False, {}, Cost(110 * MB, 1, 1, 9 * MB), ("x",), 110 * MB)
    error = infeasible(greedy, budget=Budget("100MB", "5MB"))
    assert (error.lacking_bytes, error.smallest_bytes) == (10 * MB, 110 * MB)


def test_the_error_when_no_strategy_can_serve_at_all():
    error = infeasible(Candidate("a", False, reasons=("no conv", "too flat")), Candidate("b", False, reasons=("odd",)))
    assert error.closest == "none" and error.lacking_bytes == 0
    assert str(error) == "no strategy can serve net: a: no conv, too flat; b: odd."
    excluded = Candidate("a", False, reasons=("cannot average weights",), considered=False)
    assert str(infeasible(excluded)) == "no strategy can serve net: a: cannot average weights."


@pytest.mark.parametrize("peak", [101 * MB, 250 * MB])
def test_the_smallest_budget_of_the_error_would_do(peak):
    """Asked again with the budget that the error names, the same candidate fits."""
    strategy = made_up("a", [(peak, 1, 0)])
    plan, _ = run(strategy)
    again, _ = run(strategy, budget=Budget(infeasible_error(plan).smallest_bytes))
    assert plan.choice is None and again.choice is not None


@pytest.mark.parametrize(
    ("exact", "tracks", "batch", "found"),
    [(True, True, 2, 2), (True, True, 5, None), (False, True, 2, None), (True, False, 2, None)],
)
def test_images_that_batch_norms_normalise_together_are_known_where_they_matter(exact, tracks, batch, found):
    """They train by the statistics of fewer images than the 5 that were asked for, and gradients are exact."""
    profile = Profile((UnitStats("unit", 1, 4, 1, (2,), 8, 8, tracks=tracks),))
    candidate = Candidate(
        "a", True, {}, Cost(1, 1.0, 1.0, phases=(Phase("network", 1, 1.0, batch, ("unit",)),)), exact=exact
    )
    assert norm_images(candidate, replace(WORKLOAD, batch_size=5), profile) == found


@pytest.mark.parametrize(("whole", "found"), [(True, None), (False, 2)])
def test_norms_of_whole_batches_see_all_images_of_a_step(whole, found):
    profile = Profile((UnitStats("unit", 1, 4, 1, (1,), 4, 4, tracks=True),))
    settings = {"micro_batch": 2, "micro_batches": 4, "whole_batch": whole}
    cost = Cost(1, 1.0, 1.0, phases=(Phase("network", 1, 1.0, 2, ("unit",)),))
    candidate = Candidate("a", True, settings, cost, exact=True)
    assert norm_images(candidate, replace(WORKLOAD, batch_size=8), profile) == found


def test_a_shared_probe_has_one_key_in_all_strategies_and_others_one_in_each():
    one, other = made_up("a"), made_up("b")
    (probe,) = one.probes(None, None, None)
    keys = [
        identified(replace(probe, shared=shared), strategy, WORKLOAD, "a network").same
        for shared in (True, False)
        for strategy in (one, other)
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    assert (
        identified(replace(probe, shared=True), one, replace(WORKLOAD, batch_size=20), "another network").same
        != keys[0]
    )
