"""Where nothing fits, ways are asked in processes of their own, and the budget named instead is a measured one."""

import json
from dataclasses import replace
from importlib import import_module

import pytest
from retry_samples import MB, REQUEST, Machine, alone, fitting, refusal

from snugfit._cli.options import SHOW_ALL
from snugfit._cli.output import FailedError
from snugfit._cli.retries import plan_again
from snugfit._core.budget import Budget
from snugfit._core.machine_memory import MachineMemory
from snugfit._core.option_groups import BudgetOptions, MachineOptions, ModelOptions
from snugfit._core.plan import Plan
from snugfit._core.request import Request, StrategyOptions
from snugfit._core.run_memory import RunMemory


def test_what_fits_is_not_asked_again():
    machine, found = Machine(), fitting("backprop")
    assert plan_again(REQUEST, found, machine) is found
    without = replace(REQUEST, budget=BudgetOptions())
    unable = refusal()
    assert plan_again(without, unable, machine) is unable and machine.asked == []


def test_a_way_that_fits_alone_is_found_after_the_others_left_it_no_room():
    machine = Machine(backprop=90, blockwise=48)
    first = refusal([alone("backprop"), alone("blockwise")], backprop=100 * MB, blockwise=80 * MB)
    found = plan_again(REQUEST, first, machine)
    assert machine.asked == [("backprop", "auto"), ("blockwise", "auto")] and machine.planned == []
    assert found["infeasible"] is None and found["plan"]["chosen"] == 0
    assert Request.from_json(found["request"]) == alone("blockwise")
    assert [each["strategy"] for each in found["plan"]["candidates"]] == ["blockwise", "backprop"]


def test_what_was_measured_in_a_process_of_its_own_is_not_planned_alone():
    """A worker has found the file of ImageNet weights. Leaner settings are tried as ever."""
    machine = Machine(backprop=90, blockwise=80, blockwise_lls_mxm=48)
    found = replace(REQUEST, model=ModelOptions("m", weights="a file"))
    asked = replace(REQUEST, model=ModelOptions("m", weights="imagenet"))
    again = [replace(alone(name), model=found.model) for name in ("backprop", "blockwise")]
    lean = replace(alone("blockwise", local_loss="lls-mxm"), model=found.model)
    first = {**refusal([*again, lean], backprop=95 * MB, blockwise=85 * MB), "apart": True}
    assert plan_again(asked, first, machine)["infeasible"] is None and machine.asked == [("blockwise", "lls-mxm")]
    machine = Machine(backprop=90, blockwise=80)
    refused = plan_again(asked, {**first, "retries": first["retries"][:2]}, machine)
    assert machine.planned, "the smallest budget of each is searched"
    assert machine.asked == 2 * [("blockwise", "auto")], "which is asked for again once it is found"
    assert refused["infeasible"]["message"].endswith("would do: 80.0 MB.")


def test_what_the_user_did_not_name_is_tried(capsys):
    machine = Machine(blockwise=60, blockwise_lls_mxm=50)
    first = refusal([alone("blockwise", local_loss="lls-mxm")], blockwise=70 * MB)
    found = plan_again(alone("blockwise"), first, machine)
    assert found["infeasible"] is None and machine.asked == [("blockwise", "lls-mxm")]
    assert Request.from_json(found["request"]).strategy.local_loss == "lls-mxm"
    assert "blockwise with local-loss lls-mxm" in capsys.readouterr().err


def test_of_several_that_fit_alone_the_aim_chooses_and_leaner_settings_are_not_needed():
    lean = alone("blockwise", local_loss="lls-mxm")
    first = refusal([alone("backprop"), alone("blockwise"), lean, alone("tiled")], backprop=1, blockwise=1, tiled=MB)
    answers = {
        "backprop": fitting("backprop", seconds=9.0), "blockwise": fitting("blockwise", seconds=5.0),
        "tiled": refusal(tiled=MB),
    }  # fmt: skip
    asked = []

    def plan(request):
        asked.append(request)
        return answers[request.strategy.strategy]

    found = plan_again(REQUEST, first, plan)
    assert asked == [alone("backprop"), alone("blockwise"), alone("tiled")]
    strategies = [(each["strategy"], each["feasible"]) for each in found["plan"]["candidates"]]
    assert strategies == [("blockwise", True), ("backprop", True), ("tiled", False)]
    assert Request.from_json(found["request"]) == alone("blockwise")
    assert found["plan"]["explanation"][0].startswith("blockwise is chosen for the least time to finish: ")
    assert found["comparison"] == ["backprop", "blockwise"]


def test_the_smallest_budget_is_that_of_the_leanest_way_as_measured():
    """Expected at 96 and 72 MB; measured, tiled needs 60: backprop, expected above that, is not measured."""
    machine = Machine(backprop=80, tiled=60)
    first = refusal([alone("backprop"), alone("tiled")], backprop=99 * MB, tiled=90 * MB)
    found = plan_again(REQUEST, first, machine)
    assert machine.planned == [("tiled", 72), ("tiled", 60), ("tiled", 57)]
    assert found["infeasible"]["code"] == 3
    assert "Closest: tiled (needs 60.0 MB), which lacks 10.0 MB." in found["infeasible"]["message"]
    assert found["infeasible"]["message"].endswith("Smallest budget that would do: 60.0 MB.")
    assert {each["strategy"]: each["smallest_bytes"] for each in found["plan"]["candidates"]} == {
        "backprop": 99 * MB, "tiled": 60 * MB,
    }  # fmt: skip


def test_a_way_expected_to_need_less_than_the_closest_turned_out_to_is_measured_too():
    machine = Machine(backprop=80, tiled=78)
    machine._answer = lambda request: (
        fitting(request.strategy.strategy, machine.needs[request.strategy.strategy] * MB)
        if int(request.budget.memory.removesuffix("MB")) >= machine.needs[request.strategy.strategy]
        else refusal(**{request.strategy.strategy: {"backprop": 70, "tiled": 75}[request.strategy.strategy] * MB})
    )
    first = refusal([alone("backprop"), alone("tiled")], backprop=70 * MB, tiled=75 * MB)
    found = plan_again(REQUEST, first, machine)
    budgets = {name: [size for each, size in machine.planned if each == name] for name in ("backprop", "tiled")}
    assert budgets == {"backprop": [70, 91, 80, 77], "tiled": [75, 77]}, "77 is 3 MB below 80"
    assert found["infeasible"]["message"].endswith("would do: 80.0 MB.")


def small(name):
    request = alone(name)
    return replace(request, training=replace(request.training, optimizer_state="int8"))


def rounded(name):
    return replace(small(name), training=replace(small(name).training, weight_dtype="bfloat16"))


class SmallStateMachine:
    """Fresh processes: ``backprop`` fits from one budget on with state in float32, from another in 8 bits, and from a
    third with weights in bfloat16 as well."""

    def __init__(self, float32, int8, bfloat16=10**6):
        self.needs, self.tried = {None: float32, "int8": int8, "bfloat16": bfloat16}, []

    def __call__(self, request, smallest=False):
        training, budget = request.training, int(request.budget.memory.removesuffix("MB"))
        state = training.weight_dtype or training.optimizer_state
        self.tried.append((state, budget))
        need = self.needs[state]
        found = fitting("backprop", need * MB) if budget >= need else refusal(backprop=int(need * 1.2) * MB)
        found["plan"]["workload"]["optimizer"]["state"] = training.optimizer_state or "float32"
        found["plan"]["workload"]["weight_dtype"] = training.weight_dtype or "float32"
        return found


def test_small_optimizer_state_is_planned_where_nothing_fits_without_and_the_plan_says_so(capsys):
    machine = SmallStateMachine(float32=58, int8=45)
    first = refusal([alone("backprop"), small("backprop")], backprop=60 * MB)
    found = plan_again(REQUEST, first, machine)
    assert machine.tried == [(None, 50), ("int8", 50)]
    assert Request.from_json(found["request"]) == small("backprop")
    assert "planning backprop with optimizer-state int8" in capsys.readouterr().err
    plan = Plan.from_json(found["plan"])
    assert plan.workload.optimizer.state == "int8"
    assert any("updates are not exact: --optimizer-state int8" in each for each in plan.explanation)
    assert plan.explanation[-1] == "Nothing fits with the optimizer's state in float32."


def test_weights_in_bfloat16_are_planned_where_nothing_fits_with_small_state_and_the_plan_says_so(capsys):
    machine = SmallStateMachine(float32=80, int8=58, bfloat16=45)
    first = refusal([alone("backprop"), small("backprop"), rounded("backprop")], backprop=70 * MB)
    found = plan_again(REQUEST, first, machine)
    assert machine.tried == [(None, 50), ("int8", 50), ("bfloat16", 50)]
    assert Request.from_json(found["request"]) == rounded("backprop")
    assert "planning backprop with optimizer-state int8, weight-dtype bfloat16" in capsys.readouterr().err
    plan = Plan.from_json(found["plan"])
    assert plan.workload.weight_dtype == "bfloat16"
    assert any("--weight-dtype bfloat16 rounds weights at random" in each for each in plan.explanation)
    assert plan.explanation[-1] == "Nothing fits with weights in float32."


def test_weights_in_bfloat16_are_not_planned_where_small_state_is_enough():
    machine = SmallStateMachine(float32=80, int8=48, bfloat16=40)
    first = refusal([alone("backprop"), small("backprop"), rounded("backprop")], backprop=70 * MB)
    found = plan_again(REQUEST, first, machine)
    assert machine.tried == [(None, 50), ("int8", 50)]
    assert Plan.from_json(found["plan"]).explanation[-1] == "Nothing fits with the optimizer's state in float32."


@pytest.mark.parametrize(
    ("needs", "flags"),
    [
        ((110, 70, 61), " with --optimizer-state int8 --weight-dtype bfloat16"),
        ((110, 61, 70), " with --optimizer-state int8"),
        ((61, 70, 70), ""),
        ((62, 70, 61), " with --optimizer-state int8 --weight-dtype bfloat16"),
        ((61, 61, 61), ""),
        ((62, 61, 61), " with --optimizer-state int8"),
        ((61, 62, 63), ""),
    ],
)
def test_the_smallest_budget_names_what_is_rounded_to_fit_it(needs, flags):
    first = refusal([small("backprop"), rounded("backprop")], backprop=90 * MB)
    found = plan_again(alone("backprop"), first, SmallStateMachine(*needs))
    assert found["infeasible"]["message"].endswith(
        f"Closest: backprop (needs 61.0 MB{flags}), which lacks 11.0 MB. Smallest budget that would do: 61.0 MB."
    )


def test_small_optimizer_state_is_not_planned_where_another_strategy_fits_without():
    asked = []

    def plan(request):
        asked.append((request.strategy.strategy, request.training.optimizer_state))
        return fitting("tiled") if request.strategy.strategy == "tiled" else refusal(backprop=60 * MB)

    first = refusal([alone("backprop"), alone("tiled"), small("backprop"), small("tiled")], backprop=60 * MB, tiled=MB)
    found = plan_again(REQUEST, first, plan)
    assert asked == [("backprop", None), ("tiled", None)]
    assert "Nothing fits" not in " ".join(found["plan"]["explanation"])


@pytest.mark.parametrize("expected", [90, 140])
def test_the_smallest_budget_names_small_optimizer_state(expected):
    """Whether it was planned in the budget, or is expected to need more than twice that."""
    machine = SmallStateMachine(float32=110, int8=70)
    first = refusal([small("backprop")], backprop=expected * MB)
    found = plan_again(alone("backprop"), first, machine)
    assert found["infeasible"]["message"].endswith(
        "Closest: backprop (needs 70.0 MB with --optimizer-state int8), which lacks 20.0 MB. "
        "Smallest budget that would do: 70.0 MB."
    )
    assert found["plan"]["candidates"][0]["reasons"] == ["needs 70.0 MB with --optimizer-state int8"]
    assert [size for state, size in machine.tried if state != "int8"] == [70], "float32 would be named if that fitted"


def test_state_in_float32_is_named_where_that_in_8_bits_needs_more():
    """A network as small as smallconv: the code of state in 8 bits takes more than it saves."""
    machine = SmallStateMachine(float32=66, int8=72)
    first = refusal([small("backprop")], backprop=104 * MB)
    found = plan_again(alone("backprop"), first, machine)
    assert found["infeasible"]["message"].endswith(
        "Closest: backprop (needs 66.0 MB), which lacks 16.0 MB. Smallest budget that would do: 66.0 MB."
    )


def test_a_named_strategy_without_use_for_small_state_is_searched_as_asked():
    machine = SmallStateMachine(float32=70, int8=10**6)
    first, refused = refusal([small("backprop")], backprop=80 * MB), refusal()

    def plan(request, smallest=False):
        return refused if request.training.optimizer_state else machine(request, smallest)

    found = plan_again(alone("backprop"), first, plan)
    assert found["infeasible"]["message"].endswith(
        "(needs 70.0 MB), which lacks 20.0 MB. Smallest budget that would do: 70.0 MB."
    )


def test_a_strategy_that_needs_far_more_is_measured_and_not_asked_in_vain():
    machine = Machine(backprop=130, tiled=102)
    first = refusal([alone("backprop"), alone("tiled")], backprop=140 * MB, tiled=110 * MB)
    found = plan_again(REQUEST, first, machine)
    assert machine.planned == [("tiled", 110), ("tiled", 102), ("tiled", 99)]
    assert machine.asked == 2 * [("tiled", "auto")], "the budget that was found"
    assert found["infeasible"]["message"].endswith("would do: 102.0 MB.")


def test_nothing_is_named_below_what_was_refused():
    machine = Machine(backprop=49)
    machine.ask = lambda request: refusal(backprop=55 * MB) if request.budget == REQUEST.budget else fitting("backprop")
    found = plan_again(REQUEST, refusal([alone("backprop")], backprop=60 * MB), machine)
    assert found["infeasible"]["message"].endswith("would do: 51.0 MB.")


def test_without_a_cache_a_budget_that_fits_by_chance_is_not_named():
    """55 MB were enough when they were tried, and are not when they are asked for again, by 0.1 MB."""
    machine = Machine(backprop=55)
    answers = iter([True, False, True, True])
    machine.ask = lambda request: fitting("backprop") if next(answers) else refusal(backprop=int(55.1 * MB))
    found = plan_again(alone("backprop"), refusal(backprop=60 * MB), machine)
    assert found["infeasible"]["message"].endswith("would do: 56.0 MB.") and next(answers, None) is None


def test_more_than_the_machine_has_is_not_tried():
    machine = Machine(backprop=99_000)
    first = refusal(backprop=20_000 * MB)
    assert plan_again(REQUEST, first, machine) is first
    assert machine.planned == []


def test_asked_again_the_same_budget_is_named(tmp_path):
    first = refusal(backprop=60 * MB)
    named = []
    for memory, needs in (("50MB", 55), ("50MB", 56), ("40MB", 57), ("56MB", 58)):
        request = Request(
            ModelOptions("m"), budget=BudgetOptions(memory), strategy=StrategyOptions("backprop"),
            machine=MachineOptions(profile_cache=str(tmp_path), out=f"run-{needs}"),
        )  # fmt: skip
        machine = Machine(backprop=needs)
        found = plan_again(request, first, machine)
        named.append(found["infeasible"]["message"].rpartition(": ")[2])
    assert named == ["55.0 MB.", "55.0 MB.", "55.0 MB.", "58.0 MB."], "the last was refused above what was known"


def test_a_budget_that_was_refused_while_measuring_is_tried_with_cached_measurements(tmp_path):
    """Measuring in 54 and 51 MB leaves kernels behind, with which the strategy does not fit."""
    request = with_cache_in(tmp_path)
    machine = Machine(backprop=57)
    answer = machine._answer

    def with_cache(asked):
        again = machine.planned.count(machine.planned[-1]) > 1
        machine.needs["backprop"] = 54 if again else 57
        return answer(asked)

    machine._answer = with_cache
    found = plan_again(request, refusal(backprop=60 * MB), machine)
    assert found["infeasible"]["message"].endswith("would do: 54.0 MB.")


def with_cache_in(folder):
    return Request(
        ModelOptions("m"), budget=BudgetOptions("50MB"), strategy=StrategyOptions("backprop"),
        machine=MachineOptions(profile_cache=str(folder)),
    )  # fmt: skip


def known_to_fit(tmp_path, memory):
    """A request with a budget, after 55 MB were named for it."""
    request = with_cache_in(tmp_path)
    found = plan_again(request, refusal(backprop=60 * MB), Machine(backprop=55))
    assert found["infeasible"]["message"].endswith("would do: 55.0 MB.")
    return replace(request, budget=BudgetOptions(memory), machine=replace(request.machine, out="run"))


def test_a_known_smallest_budget_that_is_refused_is_planned_once_more(tmp_path, capsys):
    """VGG-19 in its smallest budget was refused in two of four processes."""
    machine, request = Machine(backprop=55), known_to_fit(tmp_path, "55MB")
    found = plan_again(request, refusal(backprop=60 * MB), machine)
    assert found["infeasible"] is None and Request.from_json(found["request"]) == request
    assert machine.asked == [("backprop", "auto")] and machine.planned == []
    assert "this budget was enough for backprop before" in capsys.readouterr().err


def test_a_known_smallest_budget_that_is_refused_twice_names_another_that_was_tried(tmp_path):
    machine, request = Machine(backprop=57), known_to_fit(tmp_path, "55MB")
    found = plan_again(request, refusal(backprop=60 * MB), machine)
    assert found["infeasible"]["message"].endswith("would do: 57.0 MB.")
    assert machine.asked == [("backprop", "auto")] * 3, "once with 55 MB, and twice with 57 before they are named"
    assert ("backprop", 57) in machine.planned


@pytest.mark.parametrize("lasting", [53, 54, 56, 58])
def test_a_budget_is_named_that_is_enough_for_a_process_that_finds_the_measurements(tmp_path, lasting):
    """VGG-16 by checkpoint: 83 MB were named, and 85 needed by the next command, which found measurements.

    A process that asks for the budget first may measure, as VGG-19 did in 198 MB, so that only the next one tells.
    """
    measuring, cached, measured = Machine(backprop=53), Machine(backprop=lasting), set()

    def plan(each, smallest=False):
        if smallest or each.budget.memory not in measured:
            measured.update(() if smallest else {each.budget.memory})
            return measuring.plan(each)
        found = cached.plan(each)
        return refusal(backprop=lasting * MB) if found["infeasible"] else found

    found = plan_again(with_cache_in(tmp_path), refusal(backprop=60 * MB), plan)
    assert found["infeasible"]["message"].endswith(f"would do: {lasting}.0 MB.")
    assert cached.planned[-1] == ("backprop", lasting)


def test_less_than_the_known_smallest_budget_is_refused_at_once(tmp_path):
    machine, request = Machine(backprop=50), known_to_fit(tmp_path, "54MB")
    found = plan_again(request, refusal(backprop=60 * MB), machine)
    assert found["infeasible"]["message"].endswith("would do: 55.0 MB.") and machine.asked == machine.planned == []


def test_a_way_that_fits_when_planned_and_not_when_trained_is_refused(monkeypatch):
    """A process that planned it had a little more memory than the one that would train it."""
    command, refused = import_module("snugfit._cli.train"), refusal([alone("backprop")], backprop=60 * MB)
    monkeypatch.setattr(command, "run_job", lambda job, server: refused)
    monkeypatch.setattr(command, "planned", lambda request, output, noted, server: fitting("backprop"))
    with pytest.raises(FailedError, match="as guessed") as raised:
        command._started(REQUEST, SHOW_ALL)
    assert raised.value.exit_code == 3


def inexact(*retries):
    """Blockwise fits; backprop is refused, expected at 60 MB of 50."""
    first = fitting("blockwise", seconds=1.0)
    refused = refusal(backprop=60 * MB)["plan"]["candidates"]
    plan = {**first["plan"], "candidates": [*first["plan"]["candidates"], *refused], "aim": "accuracy"}
    return {**first, "plan": plan, "retries": [each.to_json() for each in retries]}


def test_an_exact_strategy_that_fits_alone_is_preferred_if_accuracy_is_the_aim():
    machine, first = Machine(backprop=50), inexact(alone("backprop"))
    del first["comparison"]  # training compares nothing
    found = plan_again(REQUEST, first, machine)
    assert machine.asked == [("backprop", "auto")] and Request.from_json(found["request"]) == alone("backprop")
    strategies = [(each["strategy"], each["feasible"]) for each in found["plan"]["candidates"]]
    assert strategies == [("backprop", True), ("blockwise", True)]


def test_what_fits_stays_chosen_if_no_exact_strategy_fits_alone():
    machine, first = Machine(backprop=51), inexact(alone("backprop"))
    assert plan_again(REQUEST, first, machine) is first and machine.asked == [("backprop", "auto")]
    machine, first = Machine(), inexact(replace(alone("backprop"), budget=BudgetOptions("20MB")))
    first["plan"]["budget"]["memory"] = 20 * MB
    assert plan_again(REQUEST, first, machine) is first and machine.asked == []


def test_what_is_planned_again_in_vain_is_trained_as_it_was_planned(monkeypatch):
    jobs, first = [], inexact(alone("backprop"))

    def run_job(job, server):
        jobs.append((job["request"]["strategy"]["strategy"], job["settled"]))
        return {"strategy": "blockwise"} if job["settled"] else first

    command = import_module("snugfit._cli.train")
    monkeypatch.setattr(command, "run_job", run_job)
    monkeypatch.setattr(command, "planned", lambda request, output, noted, server: refusal(backprop=60 * MB))
    assert command._started(REQUEST, SHOW_ALL) == {"strategy": "blockwise"}
    assert jobs == [("auto", False), ("auto", True)]


@pytest.mark.parametrize("command", ["plan", "train"])
def test_the_command_line_asks_retries(snugfit, command):
    outcome = snugfit(command, "--model", "fits-alone", "--memory", "100MB", "--json")
    assert outcome.code == 0 and "planning backprop in a process of its own" in outcome.err
    outcome = snugfit(command, "--model", "too-big", "--memory", "100MB", "--json")
    assert outcome.code == 3 and "nothing fits." in outcome.err


def test_a_plan_for_a_fresh_process_is_trained_in_one(snugfit):
    found = json.loads(snugfit("train", "--model", "fresh", "--memory", "100MB", "--json", "--threads", "2").out)
    assert found["run_dir"] == "runs/begun" and found["settings"] == {"resumed": True, "threads": [2]}
    assert snugfit("plan", "--model", "fresh", "--memory", "100MB").code == 0


AT_REST = RunMemory(150 * MB, 20 * MB, MachineMemory(10**10))
"""With the margin, 172 MB of a budget of all processes."""


def in_total(request, total, smallest=False):
    """A process whose strategy needs 55 MB above what rests."""
    budget = Budget(AT_REST.growth_in(total), total_memory=total)
    found = fitting("backprop", 55 * MB) if budget.memory >= 55 * MB else refusal(backprop=60 * MB)
    memory = Plan.from_json(found["plan"])
    return {**found, "plan": replace(memory, budget=budget, memory=AT_REST).to_json()}


@pytest.mark.parametrize("given", ["150MB", "200MB", "auto"])
def test_the_smallest_budget_of_all_processes_is_named_in_its_flag(given):
    """55 MB of growth are 227 MB in all, whether or not even what rests has its place in the budget that was given."""
    tried = []

    def plan(request, smallest=False):
        tried.append(request.budget.total_memory)
        return in_total(request, int(request.budget.total_memory.removesuffix("MB")) * MB)

    request = replace(
        REQUEST, budget=BudgetOptions(total_memory=given), strategy=StrategyOptions("backprop")
    )  # fmt: skip
    total = 180 * MB if given == "auto" else int(given.removesuffix("MB")) * MB
    found = plan_again(request, in_total(request, total), plan)
    message = found["infeasible"]["message"]
    assert f"a budget of {total // MB}.0 MB of memory in all; its processes rest at 170.0 MB." in message
    assert "backprop (needs 55.0 MB), which lacks" in message
    assert message.endswith("Smallest --total-memory that would do: 227.0 MB.")
    assert tried == ["232MB", "227MB", "225MB", "227MB", "227MB"], "the last two confirm what was found"
    assert [each["smallest_bytes"] for each in found["plan"]["candidates"]] == [55 * MB]


@pytest.mark.parametrize(("free", "tried"), [(227 * MB - 1, []), (227 * MB, [55, 52])])
def test_more_than_the_machine_has_free_is_not_tried(free, tried):
    """55 MB above what rests are 227 MB: a container that has less would kill the process that measures."""
    machine, request = Machine(backprop=55), alone("backprop")
    first = refusal(backprop=55 * MB)
    memory = replace(AT_REST, machine=MachineMemory(10**10, free))
    first["plan"] = replace(Plan.from_json(first["plan"]), memory=memory).to_json()
    found = plan_again(request, first, machine)
    assert [size for _, size in machine.planned] == tried
    assert found["infeasible"]["message"].endswith("would do: 55.0 MB." if tried else "as guessed")
