"""Plans and records of a device with a memory of its own, and host memory beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_device import MB, FakeMemory

import snugfit
from snugfit._core.budget import Budget
from snugfit._core.option_groups import BudgetOptions
from snugfit._core.plan import Plan
from snugfit._core.record import Record
from snugfit._core.run_memory import DevicePlan
from snugfit._engine import process
from snugfit._engine.run_memory import device_plan, memory_at_rest, settled_budget
from snugfit._report.tables import memory_lines
from snugfit._storage.manifest import Manifest
from snugfit._storage.run_folder import read_record
from snugfit.errors import CheckpointError, UsageError
from snugfit.memory import Baseline, make_meter
from snugfit.memory import device as devices
from snugfit.strategies import memory_estimates

GPU = torch.device("cuda:0")
SIZES = DevicePlan(100 * MB, "NVML", 80 * MB, 60 * MB, 700 * MB, 1000 * MB)


@pytest.fixture
def fake(monkeypatch):
    """A fake device in the place of the first GPU."""
    made = FakeMemory()
    monkeypatch.setattr(devices, "KINDS", {"cuda": lambda device: made})
    monkeypatch.setattr(devices, "_at_rest", {})
    return made


def test_a_plan_gives_context_reserve_tensors_and_fragmentation_apart():
    """A reserve of 400 MB has tensors and gaps as the measured one: three quarters and one."""
    assert SIZES.parts(500 * MB) == {
        "context_bytes": 100 * MB,
        "reserve_bytes": 400 * MB,
        "tensor_bytes": 300 * MB,
        "fragmentation_bytes": 100 * MB,
    }
    assert sum(SIZES.parts(70 * MB).values()) == 70 * MB  # no more context than there is peak


def test_the_parts_are_in_json_and_printed():
    made = snugfit.plan(
        "smallconv", "digits", strategy="backprop", epochs=1, image_size=8, max_train=32, device="cpu"
    ).plan
    assert made.to_json()["device_memory"] is None
    (line, *_) = memory_lines(on_device := replace(made, device_memory=SIZES, memory=None))
    assert "context and libraries" in str(line) and "fragmentation" in str(line) and "700.0 MB of 1.0 GB" in str(line)
    data, peak = on_device.to_json(), made.choice.predicted.peak_bytes
    found = data["device_memory"]
    assert found["context_bytes"] + found["tensor_bytes"] + found["fragmentation_bytes"] == peak
    assert Plan.from_json(data).choice == made.choice


def test_the_largest_peak_of_planning_is_what_a_plan_tells_of(fake):
    meter = make_meter(Baseline(0, 0), GPU)
    block = fake.allocate(50 * MB)
    meter.mark()
    fake.free_block(block)
    fake.release()
    meter.restart()
    found = device_plan(GPU, meter)
    assert (found.context_bytes, found.total_bytes) == (100 * MB, 1000 * MB)
    assert 50 * MB <= found.allocated_bytes <= found.reserved_bytes
    assert device_plan(torch.device("cpu"), make_meter(Baseline(0, 0), torch.device("cpu"))) is None


def test_the_context_belongs_to_the_process_at_rest(fake, monkeypatch):
    held = []
    monkeypatch.setattr(fake, "start", lambda: held.append(torch.ones(30 * MB, dtype=torch.uint8)))
    monkeypatch.setattr(process, "_prepared", [Baseline(100 * MB, 200 * MB, waiting=7)])
    found = process.baseline(1, GPU)
    assert 128 * MB <= found.anon <= 140 * MB and found.waiting == 7
    assert process.baseline(1, GPU) == found and memory_at_rest(found, GPU) is None


def test_predictions_leave_what_the_allocator_rounds_up_to(fake):
    before = memory_estimates.full_safety()
    devices.device_at_rest(GPU)
    assert memory_estimates.safety() == memory_estimates.full_safety() == memory_estimates.DEVICE_SAFETY != before
    assert memory_estimates.with_full_safety(memory_estimates.with_safety(0, 100 * MB)) == pytest.approx(
        memory_estimates.with_safety(0, 100 * MB), abs=2
    )


def test_a_gpu_that_is_not_there_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert process.choose_device("cuda") == GPU
    with pytest.raises(UsageError, match=r"has 1 CUDA device, and no cuda:7"):
        process.choose_device("cuda:7")


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    """Processes of a launch have chosen that of their local rank; asking for it earlier would start CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    found = [str(process.choose_device(name)) for name in (None, "cuda", "cuda:0")]
    assert found == ["cuda:1", "cuda:1", "cuda:0"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert process.choose_device(None) == process.choose_device("cuda") == GPU


def test_host_memory_is_a_budget_beside_a_device_alone():
    options = BudgetOptions(memory="1GB", host_memory="2GB")
    assert settled_budget(options, None).host_memory_bytes == 2000 * MB
    assert "2.0 GB of host memory" in str(Budget(memory="1GB", host_memory="2GB"))
    with pytest.raises(UsageError, match="--host-memory 2GB bounds the process beside the memory of a GPU"):
        settled_budget(options, SimpleNamespace())


def test_a_run_above_its_host_memory_has_failed():
    shares = {"host_bytes": 30 * MB}
    measured = {"peak_bytes": 5 * MB, "device_memory": shares}
    record = Record(
        *("backprop", "m", "d", "cuda:0", {"memory_bytes": 9 * MB, "host_memory_bytes": 20 * MB}, True, {}, measured),
        accuracy={}, parameters={}, exit=None, settings={}, run_dir="",
    )  # fmt: skip
    assert record.excess == (30 * MB, 20 * MB)
    assert replace(record, measured={**measured, "device_memory": None}).excess is None


@pytest.mark.parametrize("context", [5, -5])
def test_a_record_of_a_gpu_is_read_again_unless_its_bytes_are_impossible(context, tmp_path):
    record = Record(
        *("backprop", "m", "d", "cuda:0", {}, True, {}, {"device_memory": {"context_bytes": context}}),
        accuracy={}, parameters={}, exit=None, settings={}, run_dir="",
    )  # fmt: skip
    (tmp_path / "record.json").write_text(json.dumps(record.to_json()))
    Manifest.of(tmp_path)
    if context > 0:
        assert read_record(tmp_path) == record
        return
    with pytest.raises(CheckpointError, match=r"measured\.device_memory\.context_bytes"):
        read_record(tmp_path)
