"""A plan that was made before is not made again, unless anything that it depends on is another."""

from __future__ import annotations

import json
import os

import pytest

from snugfit._cli import plan as plan_module
from snugfit._cli import plan_cache
from snugfit._cli.options import OutputOptions
from snugfit._cli.plan import _with_memory_now
from snugfit._cli.plan_cache import PlanCache
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.machine_memory import MachineMemory
from snugfit._core.option_groups import BudgetOptions, DataOptions, MachineOptions, ModelOptions
from snugfit._core.plan import Plan
from snugfit._core.request import Request
from snugfit._core.run_memory import RunMemory
from snugfit._core.workload import Workload

WORKLOAD = Workload("m", "d", (3, 4, 4), 2, 10, 5, 5)
HARDWARE = Hardware("cpu", "cpu", 1, 10**10, "Linux", "2", True)
MB = 10**6
ASKED = ("plan", "--memory", "1MB", "--model", "m")


@pytest.fixture
def measures(snugfit):
    """Whether a command had to measure; what it printed is the same in any case."""

    def call(*flags: str) -> bool:
        outcome = snugfit(*ASKED, "--json", *flags)
        assert outcome.code in (0, 3), outcome.err
        assert outcome.json["candidates"]
        assert ("measuring" in outcome.err) != ("this plan is cached" in outcome.err)
        return "measuring" in outcome.err

    return call


def test_the_same_question_is_answered_once(snugfit, measures):
    first = snugfit(*ASKED, "--json")
    assert "measuring" in first.err and not measures()
    assert snugfit(*ASKED, "--json").out == first.out
    assert not measures("--quiet")


def test_what_does_not_fit_is_answered_again_with_the_same_error(snugfit):
    first, second = (snugfit("plan", "--memory", "1MB", "--model", "too-big", "--json") for _ in range(2))
    assert "this plan is cached" in second.err and (second.code, second.out) == (first.code, first.out)
    assert first.code == 3 and first.json["error"]["code"] == 3


@pytest.mark.parametrize(("budget", "kept"), [(None, False), ("100MB", False), ("30MB", True)])
def test_what_does_not_fit_the_memory_that_is_free_now_is_asked_again(monkeypatch, budget, kept):
    """40 MB are free for it now, and may not be later."""
    rest = RunMemory(100 * MB, 0, MachineMemory(142 * MB))
    answer = {"plan": Plan(WORKLOAD, Budget(budget), HARDWARE, memory=rest).to_json(), "infeasible": {}}
    monkeypatch.setattr(plan_module, "_planned", lambda *_: answer)
    found = []
    monkeypatch.setattr(plan_module.PlanCache, "keep", lambda _, each: found.append(each))
    plan_module._cached_or_planned(Request(), OutputOptions())
    assert bool(found) == kept


def test_another_question_is_not(measures):
    assert measures() and measures("--batch-size", "8") and measures("--threads", "3") and measures("--epochs", "2")
    assert not measures() and not measures("--batch-size", "8")


def test_users_may_have_it_measured_again_or_nothing_kept(measures):
    assert measures("--profile-cache", "off") and measures("--profile-cache", "off"), "nothing was kept"
    assert measures() and not measures()
    assert measures("--profile-cache", "renew") and measures("--profile-cache", "renew")
    assert not measures(), "what is measured again answers those who do not ask for that"
    assert measures("--profile-cache", "here") and not measures("--profile-cache", "here"), "a folder of its own"


def test_trials_are_made_each_time(snugfit):
    assert all("measuring" in snugfit(*ASKED, "--compare").err for _ in range(2))


def test_an_answer_that_cannot_be_read_or_kept_is_none(measures, tmp_path):
    cache = tmp_path / "cache"
    assert measures("--profile-cache", str(cache))
    (kept,) = (cache / "plans").iterdir()
    for broken in ("{", "[]", '{"plan"'):
        kept.write_text(broken)
        assert measures("--profile-cache", str(cache))
    kept.unlink()
    kept.parent.rmdir()
    kept.parent.write_text("a file where the folder should be")
    assert measures("--profile-cache", str(cache)) and measures("--profile-cache", str(cache))


def key(**changes: object) -> str | None:
    """Where the answer to a question is kept."""
    options = {"model": ModelOptions("m"), "budget": BudgetOptions(memory="1MB"), **changes}
    path = PlanCache(Request(**options))._path
    return path and path.name


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder of data sets, of which one has two classes."""
    for name in ("photos/cats/1.png", "photos/dogs/1.png", "cifar/batch.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.setenv("SNUGFIT_DATA", str(tmp_path))
    return tmp_path


def test_data_that_changed_are_other_data(data):
    photos, cifar = DataOptions(data="folder:photos"), DataOptions(data="cifar")
    before = key(data=photos), key(data=cifar)
    (data / "photos" / "dogs" / "2.png").write_text("x")
    assert key(data=photos) != before[0] and key(data=cifar) == before[1]
    os.utime(data / "cifar" / "batch.bin", (1, 1))
    assert key(data=cifar) != before[1]


def test_too_many_files_are_not_looked_at(data, monkeypatch):
    assert key(data=DataOptions(data="folder:photos")) is not None
    monkeypatch.setattr(plan_cache, "MOST_FILES", 3)
    assert key(data=DataOptions(data="folder:photos")) is None


def test_weights_runs_and_versions_matter(data, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    weights = elsewhere / "w.safetensors"
    weights.write_text("1")
    seen = [key(), key(model=ModelOptions("m", weights=str(weights)))]
    monkeypatch.setenv("HOME", str(elsewhere))
    before = key(model=ModelOptions("m", weights="~/w.safetensors"))
    os.utime(weights, (1, 1))
    assert key(model=ModelOptions("m", weights="~/w.safetensors")) != before
    weights.write_text("12")
    seen.append(key(model=ModelOptions("m", weights=str(weights))))
    folder = elsewhere / "profiles"
    folder.mkdir()
    machine = MachineOptions(profile_cache=str(folder))
    assert key(machine=machine) == seen[0], "wherever it is kept"
    (folder / "runs-1.jsonl").write_text("{}\n")
    seen.append(key(machine=machine))
    for change in (
        lambda: monkeypatch.setattr(plan_cache, "version", lambda package: "9.9"),
        lambda: monkeypatch.setattr(plan_cache, "code_digest", lambda: "another"),
        lambda: monkeypatch.setenv("OMP_NUM_THREADS", "7"),
        lambda: monkeypatch.setattr(plan_cache, "_machine", lambda: ["another"]),
        lambda: monkeypatch.chdir(data),
    ):
        change()
        seen.append(key())
    seen.append(key(machine=MachineOptions(cache_dir=str(elsewhere))))
    assert None not in seen and len(set(seen)) == len(seen), json.dumps(seen)


def test_the_users_own_code_is_planned_each_time():
    assert key(model=ModelOptions("nets.py:small")) is None and key(model=ModelOptions("package.nets:small")) is None
    assert key(model=ModelOptions("timm:resnet26")) is not None


def test_a_plan_for_what_the_machine_has_now_is_made_each_time():
    assert key(budget=BudgetOptions(total_memory="400MB")) not in (None, key())
    assert key(budget=BudgetOptions(total_memory="auto")) is None


def test_a_plan_that_is_answered_again_says_what_the_machine_has_now():
    memory = RunMemory(150, 20, MachineMemory(7, 9))
    now = _with_memory_now(Plan(WORKLOAD, Budget(), HARDWARE, memory=memory))
    assert (now.memory.process_bytes, now.memory.other_bytes) == (150, 20)
    assert now.memory.machine.ram_bytes > 10**6 and now.memory.machine.group_bytes != 9
    without = Plan(WORKLOAD, Budget(), HARDWARE)
    assert _with_memory_now(without) is without
