"""What a budget means on a device with a memory of its own, on one that is arithmetic."""

import resource

import pytest
import torch
from fake_device import MB, SEGMENT, FakeMemory

from snugfit.memory import Baseline, MemoryLimit, make_meter, process, read_status
from snugfit.memory import device as devices
from snugfit.memory.limit import HOST_STEP_BYTES
from snugfit.memory.process import release_memory

GPU = torch.device("cuda:0")


@pytest.fixture
def made(monkeypatch):
    """Puts a fake device in the place of the first GPU."""

    def make(**facts):
        fake = FakeMemory(**facts)
        monkeypatch.setattr(devices, "KINDS", {"cuda": lambda device: fake})
        monkeypatch.setattr(devices, "_at_rest", {})
        monkeypatch.setattr(process, "_late_bytes", [])  # imported before, so that baselines of these tests have it
        return fake

    return make


def here() -> Baseline:
    status = read_status()
    return Baseline(status.anon, status.data)


@pytest.mark.parametrize(
    ("nvml", "others", "expected", "source"),
    [
        ("own", 300 * MB, 100 * MB, "by NVML"),
        ("all", 300 * MB, 100 * MB, "growth"),
        ("none", 0, 100 * MB, "other processes included"),
        ("none", 300 * MB, 400 * MB, "other processes included"),
    ],
)
def test_the_context_at_rest_by_whatever_tells_of_it(made, nvml, others, expected, source):
    made(nvml=nvml, others=others)
    found = devices.device_at_rest(GPU)
    assert found.context_bytes == expected and source in found.source
    assert devices.device_at_rest(GPU) is found and devices.device_at_rest(torch.device("cpu")) is None


def test_a_peak_is_context_and_reserve_and_its_parts_add_up(made):
    fake = made()
    meter = make_meter(here(), GPU)
    assert "NVML" in meter.metric and meter.current_bytes == 100 * MB
    first = fake.allocate(30 * MB)
    fake.allocate(3 * MB)
    fake.free_block(first)
    assert meter.mark() == 100 * MB + fake.reserved
    shares = meter.shares
    assert shares["context_bytes"] + shares["reserved_bytes"] == meter.peak_bytes
    assert shares["allocated_bytes"] + shares["fragmentation_bytes"] == shares["reserved_bytes"]
    assert shares["allocated_bytes"] == 33 * MB + 448  # in blocks of 512 bytes
    fake.release()
    meter.restart()
    assert meter.peak_bytes == meter.current_bytes == 100 * MB + SEGMENT


def test_kernels_loaded_later_count_where_nvml_tells(made):
    fake = made()
    meter = make_meter(here(), GPU)
    fake.context += 7 * MB
    assert meter.mark() == meter.current_bytes == 107 * MB
    fake = made(nvml="all")
    meter = make_meter(here(), GPU)
    fake.context += 7 * MB
    assert meter.mark() == 100 * MB and "at rest" in meter.metric


def test_the_allocator_gets_what_the_context_leaves_and_recovers_from_a_refusal(made):
    fake = made()
    with MemoryLimit(150 * MB, here(), GPU) as limit:
        assert limit.enforced and limit.left_bytes == 50 * MB and fake.most == 50 * MB
        block = fake.allocate(40 * MB)
        with pytest.raises(torch.OutOfMemoryError):
            fake.allocate(20 * MB)
        fake.free_block(block)
        release_memory()
        assert limit.left_bytes == 50 * MB
        fake.allocate(20 * MB)
        with limit.reserve(10 * MB):
            assert fake.most == 40 * MB
        with limit.allow_kernels(), limit.allow_address_space(MB):
            assert fake.most == 50 * MB and limit.kernel_bytes == 0
    assert fake.most == fake.total


def test_a_budget_below_the_context_leaves_nothing(made):
    fake = made()
    with MemoryLimit(60 * MB, here(), GPU) as limit:
        assert limit.left_bytes == fake.most == 0
        with pytest.raises(torch.OutOfMemoryError):
            fake.allocate(1)


def test_without_a_budget_nothing_is_limited(made):
    fake = made()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with MemoryLimit(None, here(), GPU) as limit:
        assert not limit.enforced and fake.most == fake.total and limit.refresh() == 0
        assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_host_memory_has_a_budget_of_its_own_and_pinned_pages_count(made):
    fake = made()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    fake.pinned = 10 * MB
    with MemoryLimit(500 * MB, here(), GPU, host_bytes=40 * MB) as limit:
        soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
        assert abs(soft - read_status().data - 30 * MB) < 3 * MB and fake.most == 400 * MB
        with pytest.raises(RuntimeError, match="memory"):
            torch.empty(800 * MB, dtype=torch.uint8)
        limit.refresh()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    meter = make_meter(here(), GPU)
    assert 10 * MB <= meter.shares["host_bytes"] < 20 * MB and meter.peak_bytes == 100 * MB


def test_one_budget_covers_both_where_memory_is_unified(made):
    fake = made(unified=True, nvml="own")
    baseline = here()
    with MemoryLimit(900 * MB, baseline, GPU) as limit:
        assert abs(fake.most - (800 * MB - HOST_STEP_BYTES)) < 5 * MB
        held = torch.ones(50 * MB, dtype=torch.uint8)
        limit.refresh()
        assert abs(fake.most - (750 * MB - HOST_STEP_BYTES)) < 5 * MB
        with pytest.raises(RuntimeError, match="memory"):
            torch.empty(2000 * MB, dtype=torch.uint8)
        meter = make_meter(baseline, GPU)
        fake.allocate(30 * MB)
        assert meter.mark() >= 100 * MB + 30 * MB + held.nbytes
    assert fake.most == fake.total


def test_timings_wait_for_the_device(made):
    fake = made()
    devices.synchronize(GPU)
    devices.synchronize(torch.device("cpu"))
    assert fake.waits == 1
