"""Which run folder a round of a launch goes on with."""

import json
import shutil
from dataclasses import replace

import pytest

from snugfit._api.planning import plan_request
from snugfit._core.option_groups import BudgetOptions, DataOptions, MachineOptions, ModelOptions
from snugfit._core.request import Request, StrategyOptions
from snugfit._engine.running import begun, finished, for_launch
from snugfit._storage.manifest import Manifest
from snugfit._storage.outputs import require_run_folder
from snugfit._training.launch import World
from snugfit.errors import UsageError

FIRST = World(0, 1, 0, 1, restarts=0, addr="10.0.0.1", port=29400, run_id="x")
LATER = replace(FIRST, restarts=1)


def asked(out, **strategy):
    return Request(
        model=ModelOptions("smallconv", image_size=8),
        data=DataOptions("digits", max_train=32, max_val=16),
        budget=BudgetOptions(),
        machine=MachineOptions(out=str(out)),
        strategy=StrategyOptions("backprop", **strategy),
    )


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that was lost before its record was written."""
    out = tmp_path_factory.mktemp("runs") / "a"
    record = plan_request(asked(out)).run(subscribers=())
    (out / "record.json").unlink()
    Manifest.of(out)
    return out, record


def test_a_new_run_is_begun(tmp_path):
    for here in (FIRST, LATER):
        assert begun(asked(tmp_path / "new"), here) is None and finished(asked(tmp_path / "new"), here) is None
    assert for_launch(replace(asked("x"), machine=MachineOptions()), FIRST).machine.out == "runs/x"


def test_an_interrupted_run_is_gone_on_with_by_its_folder_in_any_round(interrupted):
    """The first round counts no restart, and said "runs/a is not empty"."""
    out, _ = interrupted
    assert begun(asked(out), FIRST) == begun(asked(out), LATER) == str(out)


def test_a_run_that_asked_for_something_else_is_not_taken_up(interrupted):
    out, _ = interrupted
    other = replace(asked(out), model=ModelOptions("smallconv", image_size=16))
    assert begun(other, FIRST) is None and begun(other, LATER) is None, "a round may be lost before it looks"
    cached = replace(asked(out), machine=replace(asked(out).machine, cache_dir=str(out)))
    assert begun(cached, FIRST) is None, "its caches would be looked for where they are not"
    with pytest.raises(UsageError, match="is not empty"):
        plan_request(other)


def test_what_was_lost_before_it_could_be_resumed_is_removed_by_the_next_round_alone(tmp_path):
    for name in ("request.json", "profile.json.tmp", "manifest.json", "lock"):
        (tmp_path / name).write_text("{}")
    assert begun(asked(tmp_path), FIRST) is None and len(list(tmp_path.iterdir())) == 4
    assert begun(asked(tmp_path), LATER) is None and list(tmp_path.iterdir()) == [tmp_path / "lock"]
    require_run_folder(tmp_path)


def test_nothing_is_removed_that_no_run_has_written(tmp_path):
    (tmp_path / "request.json").write_text("{}")
    (tmp_path / "thesis.json").write_text("mine")
    assert begun(asked(tmp_path), LATER) is None and len(list(tmp_path.iterdir())) == 2


def test_a_run_that_is_finished_is_not_run_again(interrupted, tmp_path):
    out, record = interrupted
    (tmp_path / "record.json").write_text(json.dumps(record.to_json()))
    shutil.copy(out / "request.json", tmp_path)
    Manifest.of(tmp_path)
    assert finished(asked(tmp_path), FIRST) is None
    assert finished(asked(tmp_path), LATER)["strategy"] == "backprop"
    assert finished(replace(asked(tmp_path), model=ModelOptions("smallconv", image_size=16)), LATER) is None
    assert begun(asked(tmp_path), LATER) is None
