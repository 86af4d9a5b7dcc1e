"""The memory of all processes of a run: what rests, what a budget of all leaves, and what a plan says of it."""

import io
from dataclasses import replace

import pytest
from core_samples import COST, HARDWARE, WORKLOAD

from snugfit._core.budget import Budget
from snugfit._core.machine_memory import MachineMemory
from snugfit._core.option_groups import BudgetOptions
from snugfit._core.plan import Candidate, Plan
from snugfit._core.run_memory import MARGIN_BYTES, RunMemory
from snugfit._planner import infeasible_error
from snugfit._report.tables import print_plan
from snugfit.errors import UsageError

MB = 10**6
AT_REST = RunMemory(150 * MB + 7, 20 * MB, MachineMemory(2000 * MB, 512 * MB))
FITS = Candidate("blockwise", True, predicted=COST)
REFUSED = Candidate("backprop", False, reasons=("needs 120.0 MB of memory",), smallest_bytes=120 * MB)


def plan(budget, *candidates, memory=AT_REST):
    chosen = 0 if candidates[0].feasible else None
    return Plan(WORKLOAD, budget, HARDWARE, candidates, chosen, memory=memory)


def printed(shown):
    stream = io.StringIO()
    print_plan(shown, stream)
    return stream.getvalue()


def test_growth_and_total_follow_from_each_other():
    """By hand: 170,000,007 bytes at rest and 2 MB of margin are 173 MB in whole."""
    assert AT_REST.total_for(0) == 173 * MB and AT_REST.total_for(40 * MB) == 213 * MB
    assert AT_REST.growth_in(213 * MB) == 40 * MB
    assert AT_REST.growth_in(213 * MB + 999_999) == 40 * MB and AT_REST.growth_in(213 * MB - 1) == 39 * MB
    assert AT_REST.growth_in(100 * MB) == AT_REST.growth_in(1) == 1 * MB, "nothing fits, and the plan says why"


@pytest.mark.parametrize(("group", "where"), [(280 * MB, "its control group"), (None, "this machine")])
def test_auto_says_what_takes_the_memory(group, where):
    """Of 320 MB others use 40 and the code of a step 80: auto is 200."""
    machine = MachineMemory(2000 * MB if group else 280 * MB, group, 320 * MB)
    memory = RunMemory(150 * MB, 20 * MB, machine, 80 * MB)
    refused = plan(Budget(27 * MB, total_memory=memory.auto_bytes), REFUSED, memory=memory)
    assert (
        f"does not fit a budget of 200.0 MB of memory in all: of the 320.0 MB of {where}, other processes use 40.0 MB "
        "and the library code of a step 80.0 MB; its processes rest at 170.0 MB. Closest"
    ) in str(infeasible_error(refused))


@pytest.mark.parametrize("total", range(175 * MB, 180 * MB, 333_333))
def test_what_rests_and_what_is_added_never_exceed_the_total(total):
    assert AT_REST.rest_bytes + AT_REST.growth_in(total) + MARGIN_BYTES <= total


def test_a_budget_of_all_processes_in_words():
    assert str(Budget(total_memory="400MB")) == "400.0 MB of memory in all"
    assert str(Budget(total_memory="auto", storage="1GB")) == "auto of memory in all, 1.0 GB of storage"
    settled = Budget(total_memory="400MB", memory="227MB")
    assert str(settled) == "400.0 MB of memory in all"
    assert (settled.total_memory_bytes, settled.memory_bytes) == (400 * MB, 227 * MB)
    assert Budget(total_memory="auto").total_memory_bytes is None
    assert (Budget("1MB").memory_flag, settled.memory_flag) == ("--memory", "--total-memory")
    with pytest.raises(UsageError):
        Budget(memory="auto")


def test_two_budgets_of_the_same_memory_are_refused():
    with pytest.raises(UsageError, match=r"--memory 100MB and --total-memory 400MB.*\n?.*give"):
        BudgetOptions(memory="100MB", total_memory="400MB")
    with pytest.raises(UsageError, match="--devices 2"):
        BudgetOptions(total_memory="auto", devices=2)
    assert BudgetOptions(total_memory=400 * MB).total_memory == "400000000B"
    assert BudgetOptions(total_memory="auto").limits_memory and BudgetOptions("1MB").limits_memory
    assert not BudgetOptions(storage="1GB").limits_memory


def test_another_size_goes_to_the_flag_that_was_given():
    assert BudgetOptions("1MB").with_memory("2MB") == BudgetOptions("2MB")
    assert BudgetOptions(total_memory="auto").with_memory("2MB") == BudgetOptions(total_memory="2MB")


@pytest.mark.parametrize(
    ("budget", "added"), [(Budget("100MB"), "budget 100.0 MB = 270.0 MB"), (Budget(), "peak 90.0 MB = 260.0 MB")]
)
def test_a_plan_prints_rest_growth_sum_and_what_the_machine_has(budget, added):
    text = printed(plan(budget, FITS))
    assert f"Memory in all: 170.0 MB at rest + {added}. This machine has 2.0 GB of RAM free for the run" in text
    assert "its control group leaves 512.0 MB.\n" in text and "warning" not in text
    outside = RunMemory(150 * MB, 0, MachineMemory(2000 * MB))
    assert "has 2.0 GB of RAM free for the run.\n" in printed(plan(budget, FITS, memory=outside))
    assert "Memory in all" not in printed(plan(budget, FITS, memory=None))


def test_a_plan_as_json_has_the_sums():
    data = plan(Budget("100MB"), FITS).to_json()
    processes = {"process_bytes": 150 * MB + 7, "other_bytes": 20 * MB, "rest_bytes": 170 * MB + 7}
    machine = {"ram_bytes": 2000 * MB, "group_bytes": 512 * MB, "size_bytes": 0}
    machine = {"machine": machine, "free_bytes": 512 * MB, "mapped_bytes": 0}
    assert data["memory"] == {**processes, **machine, "growth_bytes": 100 * MB, "total_bytes": 270 * MB + 7}
    assert Plan.from_json(data) == plan(Budget("100MB"), FITS)


def test_a_total_that_is_smaller_than_what_rests_adds_nothing():
    """170 MB rest; 150 MB leave nothing, although the plan keeps 1 MB, in which nothing fits."""
    full = plan(Budget("1MB", total_memory="150MB"), REFUSED)
    assert full.growth_bytes is full.total_bytes is None
    assert "Memory in all: 170.0 MB at rest. This machine has" in printed(full)
    assert plan(Budget("27MB", total_memory="200MB"), REFUSED).growth_bytes == 27 * MB


def test_a_plan_warns_of_a_machine_that_is_too_small():
    """90 MB on 170 MB at rest are 260; a budget that is larger than what the machine has does no harm by itself."""
    little = RunMemory(150 * MB, 20 * MB, MachineMemory(2000 * MB, 255 * MB))
    text = printed(plan(Budget("100MB"), FITS, memory=little))
    assert "warning: the run is predicted to need 260.0 MB in all, and 255.0 MB are free" in text
    assert "--total-memory auto" in text
    enough = RunMemory(150 * MB, 20 * MB, MachineMemory(260 * MB))
    assert "warning" not in printed(plan(Budget("100MB"), FITS, memory=enough))


def test_the_smallest_total_is_named_in_the_same_flag():
    """120 MB of growth on 173 MB at rest."""
    refused = plan(Budget(27 * MB, total_memory="200MB"), REFUSED)
    error = infeasible_error(refused)
    assert (error.smallest_bytes, error.lacking_bytes) == (293 * MB, 93 * MB)
    assert "a budget of 200.0 MB of memory in all; its processes rest at 170.0 MB." in str(error)
    assert str(error).endswith("which lacks 93.0 MB. Smallest --total-memory that would do: 293.0 MB.")
    assert "The smallest --total-memory that would do is 293.0 MB." in printed(refused)
    assert infeasible_error(replace(refused, memory=replace(AT_REST, mapped_bytes=1))).args == error.args
    growth = infeasible_error(plan(Budget("27MB"), REFUSED))
    assert growth.smallest_bytes == 120 * MB and "Smallest budget that would do: 120.0 MB." in str(growth)
