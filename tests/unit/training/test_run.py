"""A run's position, its accounts, and what it tells."""

import dataclasses
import json
import time

import pytest
import torch
from fake_device import MB, FakeMemory
from training_samples import PHASE, make_run

from snugfit import _stopwatch
from snugfit._core.record import ExitRecord, PhaseRecord
from snugfit._core.serial import from_data, to_data
from snugfit._training.events import Notice, PhaseDone, PhaseStarted
from snugfit._training.run import Position
from snugfit.errors import CheckpointError, DivergedError
from snugfit.memory import Baseline, make_meter
from snugfit.memory import device as devices


def test_a_position_survives_json():
    position = Position(
        phase=1, epoch=2, step=3, loss_sum=0.1 + 0.2, correct=7, samples=9, seconds=1.5, peak_bytes=10**10,
        phases=[PhaseRecord("p", ("a",), 2, 3, 4, 5, 1.0, 2.0, 3, 4)], exits=[ExitRecord("a", 0, 0.5, 9)],
        overheads={"caching": 0.5}, notes={"batches": {"p": 4}, "saturated": True},
    )  # fmt: skip
    assert from_data(Position, json.loads(json.dumps(to_data(position)))) == position


def test_an_epoch_starts_from_nothing():
    position = Position(epoch=1, step=4, loss_sum=3.0, correct=2, samples=5, seconds=9.0)
    position.start_epoch(2)
    assert position == Position(epoch=2, seconds=9.0)


def test_a_phase_is_recorded_with_what_was_measured_in_it(tmp_path):
    events = []
    run = make_run(tmp_path, [events.append])
    run.start_phase(PHASE, 0, 2, 3, 5)
    run.meter.next_peak = 80
    run.tick()
    run.meter.next_peak = 0
    run.position.phase_tensor_bytes = 60
    run.end_phase(PHASE, 3, 5, cache_bytes=11)
    (record,) = run.position.phases
    assert dataclasses.replace(record, seconds=0.0, delay_seconds=0.0) == PhaseRecord(
        "network", ("a", "b"), 2, 100, 80, 60, 3.0, 0.0, 3, 5, 11
    )
    assert 0 < record.seconds == run.position.seconds
    assert events[0] == PhaseStarted("network", 0, 2, ("a", "b"), 2, 3, 5, 100)
    assert events[1] == PhaseDone("network", 100, 80, record.seconds)


def test_the_heap_is_trimmed_every_so_often(tmp_path, monkeypatch):
    clock, trims = [1000.0], []
    monkeypatch.setattr("snugfit._training.run.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("snugfit._training.run.trim_heap", lambda: trims.append(clock[0]))
    run = make_run(tmp_path)
    for _ in range(21):
        run.tick()
        clock[0] += 0.125
    assert trims == [1000.625, 1001.25, 1001.875, 1002.5]


def test_the_next_phase_begins_its_own_accounts(tmp_path):
    run = make_run(tmp_path)
    for peak in (80, 30):
        run.meter.next_peak = 0
        run.start_phase(PHASE, 0, 2, 1, 1)
        run.meter.next_peak = peak
        run.position.epoch, run.position.step = 1, 2
        run.end_phase(PHASE, 1, 1)
    assert [record.measured_peak_bytes for record in run.position.phases] == [80, 30]
    assert run.position.peak_bytes == 80
    position = run.position
    assert (position.phase, position.epoch, position.step, position.phase_peak_bytes) == (2, 0, 0, 0)
    assert position.seconds == pytest.approx(sum(record.seconds for record in position.phases))


def test_what_a_device_keeps_reserved_of_a_phase_does_not_count_to_the_next(tmp_path, monkeypatch):
    fake = FakeMemory()
    monkeypatch.setattr(devices, "KINDS", {"cuda": lambda device: fake})
    monkeypatch.setattr(devices, "_at_rest", {})
    run = make_run(tmp_path)
    run.meter = make_meter(Baseline(0, 0), torch.device("cuda:0"))
    for size in (80 * MB, 30 * MB):
        run.start_phase(PHASE, 0, 2, 1, 1)
        fake.free_block(fake.allocate(size))
        run.end_phase(PHASE, 1, 1)
    first, second = (record.measured_peak_bytes for record in run.position.phases)
    assert first == pytest.approx(180 * MB, abs=4 * MB) and second == pytest.approx(130 * MB, abs=4 * MB)


def test_saved_and_taken_up_again(tmp_path):
    run = make_run(tmp_path)
    assert not run.resume()
    run.position.epoch, run.position.step, run.position.notes["x"] = 1, 2, [3]
    run.save({"model": {"w": torch.arange(3.0)}})
    again = make_run(tmp_path)
    assert not again.resumed
    assert again.resume() and again.resumed
    assert again.position == run.position
    assert again.resumed_tensors("model")["w"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="no tensors 'other'"):
        again.resumed_tensors("other")


def test_at_the_start_of_a_phase_there_is_nothing_to_take_up(tmp_path):
    run = make_run(tmp_path)
    run.position.phase = 1
    run.save({})
    again = make_run(tmp_path)
    assert again.resume() and not again.resumed and again.position.phase == 1


def test_without_a_checkpoint_there_are_no_tensors(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        make_run(tmp_path).resumed_tensors("model")


def test_seconds_go_on_where_they_stopped(tmp_path):
    run = make_run(tmp_path)
    run.position.seconds = 100.0
    run.save({})
    again = make_run(tmp_path)
    again.resume()
    again.tick()
    assert 100 <= again.position.seconds < 110


def test_overheads_add_up_by_kind(tmp_path):
    run = make_run(tmp_path)
    for kind, seconds in (("caching", 1.0), ("exit_selection", 4.0), ("caching", 2.5)):
        run.add_overhead(kind, seconds)
    assert run.position.overheads == {"caching": 3.5, "exit_selection": 4.0}


def test_everyone_is_told_in_order(tmp_path):
    told = []
    run = make_run(tmp_path, [lambda e: told.append(("first", e)), lambda e: told.append(("second", e))])
    run.emit(Notice("x"))
    assert told == [("first", Notice("x")), ("second", Notice("x"))]


def test_finite_losses_pass(tmp_path):
    run = make_run(tmp_path)
    run.require_finite(1e30, "here")
    with pytest.raises(DivergedError, match="nan in here, epoch 1, step 1"):
        run.require_finite(float("nan"), "here")
    with pytest.raises(DivergedError, match="--precision bfloat16 has a wider range"):
        make_run(tmp_path / "half", precision="float16").require_finite(float("inf"), "here")


def test_buffers_that_are_infinite_from_the_beginning_are_saved(tmp_path):
    run = make_run(tmp_path)
    run.infinite_buffers = {"blocks.0.mask"}
    mask = torch.tensor([0.0, float("inf"), -float("inf")])
    large = torch.full((9,), 60000.0, dtype=torch.float16)
    run.save({"model": {"blocks.0.mask": mask, "w": large}, "unit0": {"unit/blocks.0.mask": mask}})
    assert torch.equal(run.checkpoints.latest().load("model")["blocks.0.mask"], mask)
    refused = {"w": mask, "blocks.0.mask": mask * 0, "mask": mask, "blocks.0.mask/momentum": mask}
    for name, tensor in refused.items():
        with pytest.raises(DivergedError, match=f"{name} holds NaN or infinite values before epoch 1, step 1"):
            run.save({"model": {name: tensor}})


def test_a_phase_says_what_other_processes_added(tmp_path, monkeypatch):
    run = make_run(tmp_path, [])
    run.start_phase(PHASE, 0, 2, 3, 5)
    waited = (_stopwatch._Reading({"1": time.perf_counter() / 2}, {"1": 0.0}, 0.0) for _ in iter(int, 1))
    monkeypatch.setattr(_stopwatch, "_reading", lambda: next(waited))
    run._stopwatch.start()
    run.tick()
    before, run.position.phase_seconds = run.position.phase_delay_seconds, 0.0
    time.sleep(0.01)
    run.end_phase(PHASE, 3, 5)
    (record,) = run.position.phases
    assert record.delay_seconds - before == pytest.approx(record.seconds / 2, rel=0.2)
    assert run.position.phase_delay_seconds == 0.0
