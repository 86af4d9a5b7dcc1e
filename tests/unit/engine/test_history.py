"""What is measured once is not measured again, and what runs came to corrects what is predicted."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import snugfit
from snugfit._core.option_groups import MachineOptions
from snugfit._engine import history
from snugfit._engine.history import MOST_RUNS, machine_text, past_runs
from snugfit._training.events import Notice, ProbeMeasured
from snugfit.errors import UsageError


def make_net(channels=4):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(channels * 64, 2),
    )  # fmt: skip


DATA = TensorDataset(torch.rand(32, 1, 8, 8), torch.arange(32) % 2)


def plan(cache, channels=4, **options):
    events = []
    found = snugfit.plan(
        make_net(channels), DATA, subscribers=[events.append], strategy="backprop", threads=1, batch_size=8,
        profile_cache=str(cache), **{"epochs": 1, **options},
    )  # fmt: skip
    notes = [event.message for event in events if isinstance(event, Notice) and " cached; " in event.message]
    return found, notes, sum(isinstance(event, ProbeMeasured) for event in events)


def test_a_network_is_measured_once(tmp_path):
    first, notes, measured = plan(tmp_path)
    assert notes == [] and measured == 1, "the whole batch fits, so steps that hold gradients are of no use"
    second, notes, measured = plan(tmp_path, lr=0.5, epochs=3)
    assert notes == ["1 measurement of this machine was cached; --profile-cache renew repeats it"] and measured == 1
    before, after = (
        {name: replace(line, elsewhere=True, room_bytes=0, beside_bytes=0) for name, line in each.profile.lines.items()}
        for each in (first, second)
    )
    assert after == before, "but for the room that each process has"
    assert plan(tmp_path, channels=5)[1] == []
    assert plan(tmp_path, precision="bfloat16")[1] == []
    assert plan("off")[1] == []


def test_renewed_measurements_take_the_place_of_the_old(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan("auto")
    assert plan("renew")[1] == [] and plan("auto")[1] != []
    assert list((tmp_path / "snugfit" / "profiles").glob("*.json"))


def test_runs_correct_later_predictions(tmp_path, monkeypatch):
    comparable = property(lambda run: True)  # it is short, and memory that other tests left free may hold all of it
    monkeypatch.setattr("snugfit._planner.calibration.PastRun.comparable", comparable)
    cache = tmp_path / "cache"
    found, _, _ = plan(cache, out=str(tmp_path / "run"))
    record = found.run(subscribers=())
    again, _, _ = plan(cache)
    (past,) = past_runs(MachineOptions(profile_cache=str(cache)), found.plan.hardware)
    learnt = again.plan.choice.correction
    assert learnt.runs == 1 and past.seconds == record.phases[0].seconds - record.phases[0].delay_seconds
    assert learnt.seconds == pytest.approx(past.seconds / past.predicted_seconds)
    assert again.plan.choice.predicted.seconds == pytest.approx(found.plan.choice.predicted.seconds * learnt.seconds)


def test_lines_that_cannot_be_read_are_left_out(tmp_path):
    found, _, _ = plan(tmp_path, out=str(tmp_path / "run"))
    found.run(subscribers=())
    (file,) = tmp_path.glob("runs-*.jsonl")
    file.write_text('{"strategy": 1}\nnot json\n' + file.read_text() + '{"str')
    options = MachineOptions(profile_cache=str(tmp_path))
    assert [run.strategy for run in past_runs(options, found.plan.hardware)] == ["backprop"]
    file.write_bytes(b"\xff\xfe")
    assert past_runs(options, found.plan.hardware) == []


def test_the_file_of_runs_keeps_the_latest(tmp_path):
    file = tmp_path / "runs-x.jsonl"
    file.write_bytes(
        b"\xff" * 100 + b"".join(b'{"run": %d, "shape": "%s"}\n' % (run, b"3" * 150) for run in range(10_000))
    )
    history._append(file, '{"run": "last"}')
    runs = [json.loads(line)["run"] for line in file.read_text().splitlines()]
    assert runs == [*range(10_001 - MOST_RUNS, 10_000), "last"]
    history._append(file, '{"run": "more"}')
    assert len(file.read_text().splitlines()) == MOST_RUNS + 1


def test_nothing_is_kept_where_that_is_not_wanted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    found, _, _ = plan("off", out=str(tmp_path / "run"))
    found.run(subscribers=())
    assert not (tmp_path / "home").exists()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--profile-cache is auto, renew, off or a folder"):
        plan(tmp_path / "file")


def test_another_machine_is_another_text():
    hardware = plan("off")[0].plan.hardware
    assert json.loads(machine_text(hardware))[0]["threads"] == 1
    assert machine_text(hardware) != machine_text(replace(hardware, threads=2))
