"""Budget, workload, the plan as a table, the registry."""

import dataclasses
import subprocess
import sys

import pytest
from core_samples import PLAN, RECORD, WORKLOAD

from snugfit._core.budget import Budget
from snugfit._core.plan import Plan
from snugfit._core.registry import strategies, strategy_class
from snugfit._core.workload import OptimizerSettings
from snugfit.errors import UnknownNameError, UsageError


def test_a_budget_keeps_bytes():
    budget = Budget("100MB", "512MiB")
    assert (budget.memory_bytes, budget.storage_bytes) == (100_000_000, 536_870_912)
    assert Budget(100_000_000).memory_bytes == 100_000_000
    assert Budget(100e6) == Budget("100MB")
    assert (Budget().memory_bytes, Budget().storage_bytes) == (None, None)


@pytest.mark.parametrize(
    "wrong",
    [{"memory": "lots"}, {"memory": 0}, {"storage": -1}, {"time_ratio": 0}, {"time_ratio": 1.01}, {"devices": 0}],
)
def test_a_budget_that_means_nothing_is_refused(wrong):
    with pytest.raises(UsageError):
        Budget(**wrong)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Budget(), "unlimited memory"), (Budget("100MB"), "100.0 MB of memory"),
        (Budget("100MB", "2GB"), "100.0 MB of memory, 2.0 GB of storage"),
        (Budget(storage="2GB"), "unlimited memory, 2.0 GB of storage"),
        (Budget(time_ratio=0.4), "unlimited memory, time ratio 0.4"),
        (Budget("100MB", devices=3), "100.0 MB of memory, 3 devices"),
    ],
)  # fmt: skip
def test_a_budget_in_words(budget, text):
    assert str(budget) == text


@pytest.mark.parametrize("field", ["epochs", "batch_size", "batch_limit", "classes", "train_count"])
def test_a_workload_without_work_is_refused(field):
    with pytest.raises(UsageError, match=field.replace("_", " ")):
        dataclasses.replace(WORKLOAD, **{field: 0})


def test_optimizer_settings():
    assert OptimizerSettings("sgd").state_per_parameter == 1
    assert OptimizerSettings("sgd", momentum=0.0).state_per_parameter == 0
    assert OptimizerSettings("adamw").state_per_parameter == 2
    assert OptimizerSettings("adamw", state="bfloat16").state_per_parameter == 1
    assert OptimizerSettings("sgd", state="int8").state_per_parameter == (256 + 4) / (256 * 4)
    with pytest.raises(UsageError, match="--lr"):
        OptimizerSettings(lr=0)


def test_the_choice_of_a_plan():
    assert PLAN.choice is PLAN.candidates[0]
    assert dataclasses.replace(PLAN, chosen=None).choice is None
    assert Plan(WORKLOAD, Budget(), PLAN.hardware).choice is None


def test_the_registry_knows_its_strategies():
    for name in strategies():
        assert strategy_class(name).name == name
    with pytest.raises(UnknownNameError, match="'blockwise'"):
        strategy_class("blockwize")


def test_the_ground_floor_imports_no_torch():
    code = (
        "import sys, snugfit.errors, snugfit._quantities, snugfit._core.plan, snugfit._core.record, "
        "snugfit._core.request, snugfit._core.profile, snugfit._core.registry, "
        "snugfit._core.strategy_config, snugfit.strategies; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("peak", "total", "budget", "excess"),
    [
        (100, 300, {"memory_bytes": 100, "total_memory_bytes": 300}, None),
        (10**15, 10**16, {"memory_bytes": None, "total_memory_bytes": None}, None),
        (101, None, {"memory_bytes": 100}, (101, 100)),
        (100, 301, {"memory_bytes": 100, "total_memory_bytes": 300}, (301, 300)),
    ],
)
def test_a_run_above_its_budget_has_an_excess(peak, total, budget, excess):
    measured = {"peak_bytes": peak, "total_memory_bytes": total}
    assert dataclasses.replace(RECORD, measured=measured, budget=budget).excess == excess
