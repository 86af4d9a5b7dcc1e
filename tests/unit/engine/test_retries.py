"""The smallest budget that would do, on made-up strategies and by the lines of a real one."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Candidate, Cost, Plan, Shortfall
from snugfit._core.profile import ProbeLine, ProbePoint, Profile, UnitStats
from snugfit._core.request import Request
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._engine.builder import _DEFAULTS
from snugfit._engine.planning import Planned
from snugfit._engine.retries import NEXT_PROCESS_BYTES, retry_requests, smallest_budget_of, smallest_fitting
from snugfit._planner import PastRun
from snugfit.strategies.backprop.strategy import Backprop

MB = 10**6
WORKLOAD = Workload("net", "images", (3, 4, 4), 2, 32, 5, 5, batch_size=8)
HARDWARE = Hardware("cpu", "cpu", 1, 10**9, "Linux", "2", True)
LINE = ProbeLine(
    "network", 16e6, 3e6, 0.0, 0.0, 0.04, (ProbePoint(2, 22 * MB, 0.1), ProbePoint(8, 40 * MB, 0.3)), smallest_batch=2
)
PROFILE = Profile((), {"network": LINE}, {"network": 9 * MB}, base_bytes=5 * MB)


@dataclass(frozen=True)
class Fixed:
    """Fits from ``need`` bytes on."""

    name: str
    need: int
    exact: bool = False

    def propose(self, workload, profile, hardware, budget):
        if budget.memory_bytes >= self.need:
            yield self

    def estimate(self, workload, profile, hardware):
        return Cost(self.need, 1.0, 1.0)

    def shortfall(self, workload, profile, hardware, budget):
        return Shortfall(("too little",), self.need)


def smallest(strategies, memory, *feasible, profile=PROFILE, runs=()):
    candidates = tuple(Candidate(name, True) for name in feasible)
    plan = Plan(WORKLOAD, Budget(memory), HARDWARE, candidates, 0 if feasible else None)
    return smallest_budget_of(strategies, plan, profile, runs)


def test_the_least_of_all_that_fit():
    strategies = [Fixed("a", 61 * MB), Fixed("b", 47 * MB + 1), Fixed("unfit", 12 * MB)]
    assert smallest(strategies, "100MB", "a", "b") == 48 * MB + NEXT_PROCESS_BYTES
    assert smallest(strategies, "100MB", "a") == 61 * MB + NEXT_PROCESS_BYTES


def test_without_anything_that_fits_or_any_limit_there_is_none():
    assert smallest([Fixed("a", 61 * MB)], "60MB") is None
    assert smallest([Fixed("a", 61 * MB)], None, "a") is None


def test_the_budget_named_is_proposed_in_and_less_is_not():
    """By hand: (5 + 22 MB) * 1.015 + 2.5 + 5 = 34.9 MB, so 35."""
    strategy = Backprop(accumulate=False)
    assert smallest([strategy], "100MB", "backprop") == 35 * MB + NEXT_PROCESS_BYTES
    assert not list(strategy.propose(WORKLOAD, PROFILE, HARDWARE, Budget("34MB")))
    assert list(strategy.propose(WORKLOAD, PROFILE, HARDWARE, Budget("35MB")))


@pytest.mark.parametrize(("cache", "base"), [("auto", 25 * MB), ("off", 5 * MB)])
def test_the_budget_named_is_enough_for_a_process_that_finds_the_measurements(cache, base):
    """There the base is 20 MB larger, times 1.015: 55.2 MB, and 34.9 without a cache."""
    request = Request.of(strategy="backprop", accumulate=False, profile_cache=cache)
    plan = Plan(WORKLOAD, Budget("100MB"), HARDWARE, (Candidate("backprop", True),), 0)
    planned = Planned(
        plan, PROFILE, replace(PROFILE, base_bytes=25 * MB), assembly=SimpleNamespace(request=request), baseline=None
    )
    expected = smallest([Backprop(accumulate=False)], "100MB", "backprop", profile=replace(PROFILE, base_bytes=base))
    assert smallest_fitting(planned) == expected


def test_past_runs_that_needed_more_than_was_predicted_raise_it():
    run = PastRun("backprop", "net", (3, 4, 4), 10.0, 10.0, 100 * MB, 150 * MB)
    found = smallest([Backprop(accumulate=False)], "100MB", "backprop", runs=[run])
    assert 35 * MB * 1.5 <= found <= 36 * MB * 1.55


def retries(*short, **options):
    candidates = tuple(Candidate(name, False, smallest_bytes=1) for name in short)
    plan = Plan(WORKLOAD, Budget("50MB"), HARDWARE, candidates)
    planned = SimpleNamespace(assembly=SimpleNamespace(request=Request.of(**options)), plan=plan)
    return [
        (each.strategy.strategy, each.strategy.local_loss, each.training.optimizer_state, each.training.weight_dtype)
        for each in retry_requests(planned)
    ]


def test_every_strategy_is_planned_alone_then_leaner_then_with_small_state_and_weights_and_exact_ones_first():
    blocks = [("blockwise", "auto"), ("blockwise", "lls-mxm")]
    everything = [("backprop", "auto"), *blocks]
    found = [(*each, None, None) for each in everything]
    small = [("backprop", "auto", "int8", None), ("tiled", "auto", "int8", None)]
    rounded = [("backprop", "auto", "int8", "bfloat16")]
    local = [(*each, "int8", None) for each in blocks]
    assert retries("backprop", "blockwise") == [*found, small[0], *rounded, *local]
    assert retries("blockwise", optimizer_state="float32") == [(*each, "float32", None) for each in blocks]
    assert retries("backprop", "tiled")[-3:] == [*small, *rounded], "tiled keeps its weights in float32"


def exact_retries(aim, *fits, few=None, tracks=False, alone=(), apart=False, **options):
    names = ("backprop", "checkpoint", "tiled")
    refused = [Candidate(name, False, smallest_bytes=60 * MB, exact=True) for name in names if name not in fits]
    exact = {name: name in names for name in fits}
    fitting = [
        Candidate(name, True, predicted=Cost(1, 1.0, 1.0), exact=exact[name], norm_images=few if exact[name] else None)
        for name in fits
    ]
    fitting = [replace(each, fine_tunes=each.strategy == "elastic") for each in fitting]
    plan = Plan(WORKLOAD, Budget("50MB"), HARDWARE, (*fitting, *refused), 0, aim)
    request = Request.of(**{"memory": "50MB", **options})
    profile = Profile((UnitStats("unit", 1, 4, 1, (2,), 8, 8, tracks=tracks),))
    assembly = SimpleNamespace(request=request)
    planned = SimpleNamespace(assembly=assembly, plan=plan, profile=profile, may_fit_alone=alone, apart=apart)
    return [
        each.strategy.strategy + (" by whole batches" if each.strategy.batch_norm == "exact" else "")
        for each in retry_requests(planned)
    ]


def test_exact_strategies_are_planned_alone_if_accuracy_is_the_aim_and_what_fits_is_not_exact():
    assert exact_retries("accuracy", "blockwise") == ["backprop", "checkpoint"]
    assert exact_retries("time", "blockwise") == exact_retries("accuracy", "tiled") == []
    assert exact_retries("accuracy", "blockwise", strategy="blockwise") == []
    assert exact_retries("accuracy", "blockwise", memory=None) == []
    assert exact_retries("accuracy", "elastic", tracks=True) == [], "it is how to fine-tune on few images"
    assert exact_retries("accuracy", "blockwise", apart=True) == [], "they were measured alone"
    assert exact_retries("accuracy", "blockwise", apart=True, tracks=True) == ["backprop by whole batches"]


def test_what_may_fit_alone_is_planned_alone_whatever_the_aim():
    assert exact_retries("time", "blockwise", alone=("backprop",)) == ["backprop"]
    assert exact_retries("accuracy", "blockwise", alone=("backprop", "elastic")) == [
        "backprop",
        "elastic",
        "checkpoint",
    ]


def test_norms_by_whole_batches_are_planned_where_exact_strategies_are_refused_or_see_few_images():
    whole = "backprop by whole batches"
    assert exact_retries("accuracy", "blockwise", tracks=True) == ["backprop", "checkpoint", whole]
    assert exact_retries("accuracy", "blockwise", "checkpoint", few=2) == ["backprop", whole]
    assert exact_retries("accuracy", "backprop", few=7, strategy="backprop") == [whole]
    assert exact_retries("accuracy", "backprop", few=8, strategy="backprop") == []
    assert exact_retries("accuracy", "checkpoint", few=2, strategy="checkpoint") == []
    assert exact_retries("time", "backprop", few=2, strategy="backprop") == []


def test_norms_by_whole_batches_are_not_planned_against_the_users_own_choice():
    assert exact_retries("accuracy", "backprop", few=2, strategy="backprop", batch_norm="micro") == []
    assert exact_retries("accuracy", "blockwise", tracks=True, batch_norm="micro") == ["backprop", "checkpoint"]
    assert Request.of(strategy="backprop").strategy.batch_norm is None


def test_without_optimizer_state_only_weights_are_rounded(monkeypatch):
    monkeypatch.setitem(_DEFAULTS, "sgd", OptimizerSettings("sgd", momentum=0.0))
    assert retries("backprop") == [("backprop", "auto", None, None), ("backprop", "auto", None, "bfloat16")]
    assert [tuple(types) for _, _, *types in retries("backprop", strategy="backprop")] == [(None, "bfloat16")]
    assert retries("backprop", strategy="backprop", ema=0.9) == [], "an average is not rounded"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"strategy": "backprop"}, [("int8", None), ("int8", "bfloat16")]),
        ({"strategy": "backprop", "optimizer_state": "float32"}, []),
        ({"strategy": "backprop", "optimizer_state": "bfloat16"}, []),
        ({"strategy": "backprop", "optimizer_state": "int8"}, []),
        ({"strategy": "backprop", "optimizer": "schedulefree"}, []),
        ({"strategy": "backprop", "weight_dtype": "float32"}, [("int8", "float32")]),
        ({"strategy": "backprop", "weight_dtype": "bfloat16"}, [("int8", "bfloat16")]),
        ({"strategy": "backprop", "optimizer_state": "float32", "weight_dtype": "bfloat16"}, []),
        ({"optimizer_state": "float32"}, [("float32", None)]),
    ],
)
def test_the_types_of_optimizer_state_and_weights_are_the_users_if_named(options, found):
    assert [tuple(types) for _, _, *types in retries("backprop", **options)] == found


def test_what_a_strategy_refuses_beside_its_own_options_is_not_planned_again():
    """Batch norms by whole batches have weights in float32, and no averages."""
    exact = {"strategy": "backprop", "batch_norm": "exact"}
    assert [tuple(types) for _, _, *types in retries("backprop", **exact)] == [("int8", None)]
    assert exact_retries("accuracy", "backprop", few=2, strategy="backprop", optimizer="schedulefree") == []
