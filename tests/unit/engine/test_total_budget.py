"""A budget of all processes becomes the growth of the one that trains, in a plan and when a run is resumed."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import snugfit
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.machine_memory import MachineMemory
from snugfit._core.option_groups import BudgetOptions
from snugfit._core.plan import Candidate, Cost, Phase, Plan
from snugfit._core.run_memory import RunMemory
from snugfit._core.workload import Workload
from snugfit._engine import planning, run_memory
from snugfit._engine.run_memory import (
    budget_warning,
    by_flag,
    limit_bytes,
    measurable_bytes,
    memory_at_rest,
    settled_budget,
)
from snugfit.errors import InfeasibleBudgetError, UsageError
from snugfit.memory import Baseline, MemoryStatus, process

MB = 10**6
CPU = torch.device("cpu")
MACHINE = MachineMemory(2000 * MB, 512 * MB)
AT_REST = RunMemory(150 * MB, 20 * MB, MACHINE)
COST = Cost(90 * MB, 1.0, 1.0)


def plan(**budget):
    work = Workload("net", "images", (3, 4, 4), 2, 32, 5, 5)
    hardware = Hardware("cpu", "cpu", 1, 10**9, "Linux", "2", True)
    return Plan(work, Budget(**budget), hardware, (Candidate("backprop", True, predicted=COST),), 0)


def test_without_a_total_the_budget_is_what_was_given():
    assert settled_budget(BudgetOptions("100MB", storage="1GB"), AT_REST) == Budget("100MB", "1GB")
    assert settled_budget(BudgetOptions(), None) == Budget()


def test_a_total_leaves_what_does_not_rest():
    """172 MB at rest and in the margin."""
    settled = settled_budget(BudgetOptions(total_memory="400MB"), AT_REST)
    assert (settled.memory_bytes, settled.total_memory_bytes) == (228 * MB, 400 * MB)
    assert settled_budget(BudgetOptions(total_memory="160MB"), AT_REST).memory_bytes == MB


@pytest.mark.parametrize(("touched", "mapped"), [(7 * MB, 7 * MB), (None, 60 * MB)])
def test_files_that_every_step_reads_or_all_where_the_kernel_does_not_tell(monkeypatch, touched, mapped):
    monkeypatch.setattr(run_memory, "read_status", lambda: MemoryStatus(anon=0, file=60 * MB))
    monkeypatch.setattr(run_memory, "touched_file_bytes", lambda work: touched)
    assert memory_at_rest(Baseline(0, 0), CPU).mapped_bytes == mapped


def test_auto_is_what_is_free_without_the_files_that_every_step_reads():
    settled = settled_budget(BudgetOptions(total_memory="auto"), replace(AT_REST, mapped_bytes=60 * MB))
    assert settled.total_memory_bytes == (512 - 60) * MB and settled.memory_bytes == (452 - 172) * MB
    full = RunMemory(150 * MB, 20 * MB, MachineMemory(10 * MB))
    assert settled_budget(BudgetOptions(total_memory="auto"), full).memory_bytes == MB


def test_what_a_total_cannot_count_is_refused(monkeypatch):
    assert memory_at_rest(Baseline(0, 0), torch.device("cuda", 0)) is None
    with pytest.raises(UsageError, match="on cuda"):
        settled_budget(BudgetOptions(total_memory="400MB"), None)
    monkeypatch.setattr(run_memory, "commands_of_run", SimpleNamespace)
    with pytest.raises(UsageError, match="each process of a launch its --memory"):
        settled_budget(BudgetOptions(total_memory="400MB"), AT_REST)


def resumed(monkeypatch, rest, **budget):
    monkeypatch.setattr(run_memory, "memory_at_rest", lambda *_: RunMemory(rest, 0, MACHINE))
    return limit_bytes(plan(**budget), Baseline(rest, 0), CPU)


def test_a_resumed_run_may_add_no_more_than_its_plan_and_than_the_total_leaves(monkeypatch):
    total = {"memory": 100 * MB, "total_memory": 272 * MB}
    assert resumed(monkeypatch, 170 * MB, **total) == resumed(monkeypatch, 150 * MB, **total) == 100 * MB
    assert resumed(monkeypatch, 180 * MB, **total) == 92 * MB
    assert resumed(monkeypatch, 999 * MB, memory="100MB") == 100 * MB and resumed(monkeypatch, 1) is None


def test_without_a_total_nothing_is_read(monkeypatch):
    monkeypatch.delattr(run_memory, "memory_at_rest")
    assert limit_bytes(plan(memory="100MB"), Baseline(0, 0), CPU) == 100 * MB


def test_a_resumed_run_needs_no_memory_for_what_the_heap_would_keep(monkeypatch):
    phase = Phase("network", 100 * MB, 1.0, 16, kept_bytes=20 * MB)
    monkeypatch.setattr(sys.modules[__name__], "COST", Cost(100 * MB, 1.0, 1.0, phases=(phase,)))
    total = {"memory": 110 * MB, "total_memory": 282 * MB}
    assert resumed(monkeypatch, 195 * MB, **total) == 87 * MB
    with pytest.raises(InfeasibleBudgetError):
        resumed(monkeypatch, 203 * MB, **total)


def test_a_resumed_run_whose_processes_rest_at_too_much_names_the_total_that_would_do(monkeypatch):
    """90 MB were predicted; 190 MB at rest, with their margin, make 282."""
    with pytest.raises(InfeasibleBudgetError, match=r"rest at 190.0 MB now.*\n?.*--total-memory.*282.0 MB") as failed:
        resumed(monkeypatch, 190 * MB, memory=100 * MB, total_memory=272 * MB)
    assert failed.value.lacking_bytes == 8 * MB


def in_two_gigabytes(by_keyword):
    """What a plan and its run tell of 2 GB, given as a keyword of its own or as a `Budget`."""
    import snugfit

    budget = {"total_memory": 2 * 10**9} if by_keyword else {"budget": snugfit.Budget(total_memory="2GB")}
    small = {"strategy": "backprop", "epochs": 1, "image_size": 8, "max_train": 32, "batch_size": 8}
    planned = snugfit.plan("smallconv", "digits", **small, **budget)
    memory, settled = planned.plan.memory, planned.plan.budget
    record = planned.run(())
    return {
        "others": memory.other_bytes,
        "budget": (settled.total_memory_bytes, settled.memory_bytes == memory.growth_in(2 * 10**9)),
        "shown": "Memory in all" in str(planned),
        "totals": (
            memory.rest_bytes,
            record.measured["total_memory_bytes"],
            record.predicted["total_memory_bytes"],
        ),
    }


def by_keyword():
    return in_two_gigabytes(True)


def by_budget():
    return in_two_gigabytes(False)


@pytest.mark.parametrize("given", [by_keyword, by_budget])
def test_python_takes_the_same_keyword(given, fresh_process, tmp_path):
    """In a process of its own: in the heap of other tests a run may find less room than its probes did."""
    found = fresh_process(given, helpers=(in_two_gigabytes,), folder=tmp_path)[given.__name__]
    assert found["others"] == 0 and found["budget"] == [2 * 10**9, True] and found["shown"]
    resting, measured, predicted = found["totals"]
    assert resting < measured <= predicted <= 2 * 10**9


def test_a_run_warns_before_it_trains_on_a_machine_that_is_too_small(tmp_path, monkeypatch):
    small = {"strategy": "backprop", "epochs": 1, "image_size": 8, "max_train": 32, "batch_size": 8}
    planned, events = snugfit.plan("smallconv", "digits", **small), []
    monkeypatch.setattr(run_memory, "machine_memory", lambda own: MachineMemory(10**12, own + 1))
    planned.run((events.append,), tmp_path / "run")
    kinds = [type(event).__name__ for event in events]
    (warning,) = [
        event.message for event in events if isinstance(event, snugfit.Notice) and "free for it" in event.message
    ]
    assert "is predicted to need" in warning and kinds.index("Notice") < kinds.index("PhaseStarted")


def test_a_run_predicts_its_total_from_the_memory_at_rest_when_it_begins(tmp_path, monkeypatch):
    """As when it is resumed, in a process that rests at 50 MB more than the one that planned."""
    small = {"strategy": "backprop", "epochs": 1, "image_size": 8, "max_train": 32, "batch_size": 8}
    planned = snugfit.plan("smallconv", "digits", **small)
    monkeypatch.setattr(process, "_late_bytes", [*process._late_bytes, 50 * MB])
    predicted = planned.run((), tmp_path / "run").predicted
    before = planned.plan.memory.rest_bytes + predicted["peak_bytes"]
    assert predicted["total_memory_bytes"] - before == pytest.approx(50 * MB, abs=MB)


def test_a_budget_that_allows_more_than_is_free_is_warned_of_before_anything_is_measured(monkeypatch):
    small = {"strategy": "backprop", "epochs": 1, "image_size": 8, "max_train": 32, "batch_size": 8}
    monkeypatch.setattr(run_memory, "machine_memory", lambda own: MachineMemory(10**12, own + 50 * MB))
    events = []
    snugfit.plan("smallconv", "digits", subscribers=(events.append,), memory="100MB", **small)
    assert isinstance(events[0], snugfit.Notice) and "--memory allows" in events[0].message
    assert budget_warning(Budget(340 * MB), AT_REST) == "", "the control group has 512 MB, and 170 MB rest"
    assert "allows 513.0 MB in all, and 512.0 MB are free" in budget_warning(Budget(343 * MB), AT_REST)


def test_measuring_stays_within_what_the_machine_has():
    """512 MB, of which 172 rest or are margin."""
    assert measurable_bytes(Budget(), AT_REST) == 340 * MB and measurable_bytes(Budget(), None) is None
    assert measurable_bytes(Budget(5 * MB), None) == 5 * MB
    assert measurable_bytes(Budget(300 * MB), AT_REST) == 300 * MB
    assert measurable_bytes(Budget(400 * MB), AT_REST) == 340 * MB
    assert measurable_bytes(Budget(400 * MB), RunMemory(150 * MB, 0, MachineMemory(10 * MB))) == MB


def test_without_a_budget_a_plan_names_what_the_machine_lacks(monkeypatch):
    small = {"strategy": "backprop", "epochs": 1, "max_train": 32, "batch_size": 8, "profile_cache": "off"}
    monkeypatch.setattr(run_memory, "machine_memory", lambda own: MachineMemory(10**12, own + 30 * MB, own + 40 * MB))
    plan = snugfit.plan("vgg8", "digits", **small)
    free = plan.plan.memory.headroom_bytes
    assert 20 * MB < free < 30 * MB and "Nothing fits what this machine has free" in str(plan)
    with pytest.raises(InfeasibleBudgetError, match=r"does not fit the 2\d.* that this machine has free") as failed:
        plan.run(())
    assert failed.value.smallest_bytes - failed.value.lacking_bytes == free


def test_imports_while_a_plan_is_made_leave_less_of_a_total(monkeypatch):
    """The plan is made again, and its notices are shown once."""
    small = {"strategy": "backprop", "epochs": 1, "image_size": 8, "max_train": 32, "batch_size": 8}
    assemble, resting = planning.assemble, planning.baseline()

    def importing(*args):
        monkeypatch.setattr(process, "_late_bytes", [50 * MB])
        return assemble(*args)

    monkeypatch.setattr(process, "_late_bytes", [])
    monkeypatch.setattr(planning, "assemble", importing)
    monkeypatch.setattr(planning, "baseline", lambda *_: resting)
    monkeypatch.setattr(run_memory, "machine_memory", lambda own: MachineMemory(10**12, own + 500 * MB))
    events = []
    plan = snugfit.plan("smallconv", "digits", subscribers=(events.append,), total_memory="2GB", **small).plan
    notices = [event.message for event in events if isinstance(event, snugfit.Notice)]
    assert sum("--total-memory allows" in each for each in notices) == 1 and len(set(notices)) == len(notices)
    assert plan.memory.process_bytes == resting.anon + 50 * MB
    assert plan.budget.memory_bytes == plan.memory.growth_in(2000 * MB)


def test_an_error_of_a_strategy_names_the_total_too():
    """10 MB that lack are 10 in both; 110 MB of growth are 282 in all."""
    said = {"closest": "elastic", "lacking_bytes": 10 * MB, "smallest_bytes": 110 * MB}
    total = replace(plan(memory=100 * MB, total_memory=272 * MB), memory=AT_REST)
    with pytest.raises(InfeasibleBudgetError, match=r"Nothing\. Closest: elastic") as failed, by_flag(total):
        raise InfeasibleBudgetError("Nothing.", **said)
    assert str(failed.value).endswith("lacks 10.0 MB. Smallest --total-memory that would do: 282.0 MB.")
    with (
        pytest.raises(InfeasibleBudgetError, match=r"Smallest budget that would do: 110\.0 MB"),
        by_flag(plan(memory=1)),
    ):
        raise InfeasibleBudgetError("Nothing.", **said)


@pytest.mark.parametrize(
    "text", ["error return without exception set", "<f> returned NULL without setting an exception"]
)
def test_a_network_for_which_there_is_no_memory_is_planned_without_measuring(monkeypatch, text):
    """Python reports a failed allocation as a SystemError, too."""
    real, calls = planning.assemble, []

    def assemble(*given):
        calls.append(given)
        if len(calls) == 1:
            raise SystemError(text)
        return real(*given)

    monkeypatch.setattr(planning, "assemble", assemble)
    found = snugfit.plan("smallconv", "digits", memory="1MB", strategy="backprop", max_train=64, threads=1)
    assert found.plan.choice is None and len(calls) == 2
