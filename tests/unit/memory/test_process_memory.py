"""The meter and the limit on real allocations, in a process of their own."""

import resource
import sys

import pytest
import torch

from snugfit.memory import Baseline, MemoryLimit, is_out_of_memory, make_meter, read_status
from snugfit.memory.limit import can_enforce
from snugfit.memory.meter import ProcessMeter
from snugfit.memory.process import has_proc

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_DATA")
MB = 10**6


def measure_known_allocations():
    import torch

    from snugfit.memory import make_meter, prepare_process

    baseline = prepare_process(1)
    meter = make_meter(baseline, torch.device("cpu"))
    at_rest = meter.current_bytes
    block = torch.ones(10_000_000)
    marked, current = meter.mark(), meter.current_bytes
    del block
    still, after = meter.mark(), meter.current_bytes
    meter.restart()
    forgotten = meter.mark()
    for _ in range(3):
        torch.ones(5_000_000)
    again = meter.mark()
    reserved = torch.empty(10_000_000)
    untouched = meter.mark()
    return {
        "at_rest": at_rest,
        "marked": marked,
        "current": current,
        "still": still,
        "after": after,
        "forgotten": forgotten,
        "again": again,
        "untouched": untouched,
        "metric": meter.metric,
        "exact": meter.exact,
        "length": len(reserved),
    }


def measure_while_file_maps_grow():
    """A peak that is over when file maps grow, beside what a process outside reads of RssAnon meanwhile."""
    import mmap
    import subprocess
    import sys
    import tempfile
    import time
    from pathlib import Path

    import torch

    from snugfit.memory import make_meter, prepare_process, read_status

    baseline = prepare_process(1)
    watch = (
        "import re, sys, time\nhighest = 0\nprint('ready', flush=True)\n"
        "while not sys.stdin.closed and time.monotonic() < float(sys.argv[2]):\n"
        "    text = open(f'/proc/{sys.argv[1]}/status').read()\n"
        "    highest = max(highest, int(re.search(r'RssAnon:\\s+(\\d+)', text)[1]) * 1024)\n"
        "    time.sleep(0.001)\n"
        "print(highest, flush=True)\n"
    )
    import os

    end = str(time.monotonic() + 1.5)
    observer = subprocess.Popen(
        [sys.executable, "-c", watch, str(os.getpid()), end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    observer.stdout.readline()
    with tempfile.TemporaryFile() as file:
        file.truncate(30_000_000)
        meter = make_meter(baseline, torch.device("cpu"))
        meter.restart()
        block = torch.ones(10_000_000)
        time.sleep(0.3)
        del block
        with mmap.mmap(file.fileno(), 30_000_000, prot=mmap.PROT_READ) as mapped:
            touched = sum(mapped[at] for at in range(0, 30_000_000, 4096))
            status = read_status()
            marked = meter.mark()
    by_mark_alone = status.high_water - status.file - status.shmem - baseline.anon
    seen = int(observer.stdout.read().split()[-1]) - baseline.anon
    threads = len(list(Path("/proc/self/task").iterdir()))
    del meter
    time.sleep(0.1)
    left = len(list(Path("/proc/self/task").iterdir()))
    return {"marked": marked, "by_mark_alone": by_mark_alone, "outside": seen, "touched": touched,
            "threads": threads, "left": left}  # fmt: skip


def measure_while_file_maps_are_dropped():
    """A peak beside 30 MB of a mapped file that are not resident any more when the meter is marked."""
    import mmap
    import tempfile
    import time

    import torch

    from snugfit.memory import make_meter, prepare_process, read_status

    baseline = prepare_process(1)
    with tempfile.TemporaryFile() as file:
        file.truncate(30_000_000)
        meter = make_meter(baseline, torch.device("cpu"))
        with mmap.mmap(file.fileno(), 30_000_000, prot=mmap.PROT_READ) as mapped:
            touched = sum(mapped[at] for at in range(0, 30_000_000, 4096))
            meter.restart()
            block = torch.ones(5_000_000)
            time.sleep(0.3)
            del block
    status = read_status()
    by_file_pages_now = status.high_water - status.file - status.shmem - baseline.anon
    return {"marked": meter.mark(), "by_file_pages_now": by_file_pages_now, "touched": touched}


def multiply_one_sample():
    """A convolution of one sample in one thread, which torch computes by matrix products with MKL's own buffers."""
    import torch

    from snugfit.memory import prepare_process, read_status, release_memory, trim_heap

    prepare_process(1)
    layer = torch.nn.Conv2d(512, 512, 3, padding=1, bias=False).to(memory_format=torch.channels_last)

    def step(batch):
        inputs = torch.randn(batch, 512, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
        layer(inputs).sum().backward()
        layer.weight.grad = None

    step(2)
    release_memory()
    before = read_status().anon
    step(1)
    kept = read_status().anon - before
    trim_heap()
    return {"kept": kept, "trimmed": read_status().anon - before}


@pytest.fixture(scope="module")
def in_own_process(fresh_process):
    return fresh_process(
        prepare_twice,
        measure_known_allocations,
        measure_while_file_maps_grow,
        measure_while_file_maps_are_dropped,
        allocate_under_a_limit,
        reserve_address_space,
        train_in_a_small_budget,
        leave_holes_in_the_heap,
        use_a_heap_with_large_free_blocks,
    )


def import_snugfit_before_torch():
    import snugfit.memory  # noqa: F401


@linux
@pytest.mark.parametrize(("before", "figure"), [((), "trimmed"), ((import_snugfit_before_torch,), "kept")])
def test_matrix_products_keep_no_buffers(before, figure, fresh_process, monkeypatch):
    monkeypatch.delenv("MKL_DISABLE_FAST_MM", raising=False)
    assert fresh_process(*before, multiply_one_sample)["multiply_one_sample"][figure] < MB


@linux
def test_the_meter_measures_a_known_allocation_and_forgets_it(in_own_process):
    seen = in_own_process["measure_known_allocations"]
    assert abs(seen["at_rest"]) < MB
    assert seen["marked"] - seen["at_rest"] == pytest.approx(40 * MB, abs=MB)
    assert seen["current"] - seen["at_rest"] == pytest.approx(40 * MB, abs=MB)
    assert seen["still"] == pytest.approx(seen["marked"], abs=MB)
    assert abs(seen["after"] - seen["at_rest"]) < MB
    assert abs(seen["forgotten"] - seen["at_rest"]) < MB
    assert seen["metric"].startswith("RssAnon") or not seen["exact"]
    if seen["exact"]:
        assert seen["again"] - seen["at_rest"] == pytest.approx(20 * MB, abs=MB), "a peak between two marks was missed"
        assert seen["untouched"] == pytest.approx(seen["again"], abs=MB), "reserved pages are not resident"


def allocate_under_a_limit():
    import resource

    import torch

    from snugfit.memory import MemoryLimit, is_out_of_memory, prepare_process

    def refused(megabytes):
        try:
            torch.ones(megabytes * 250_000)
        except (RuntimeError, MemoryError) as error:
            return is_out_of_memory(error)
        return None

    baseline = prepare_process(1)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    found = {"unlimited": refused(100)}
    with MemoryLimit(40_000_000, baseline, torch.device("cpu")) as limit:
        inside = resource.getrlimit(resource.RLIMIT_DATA)
        found |= {"enforced": limit.enforced, "within": refused(35), "beyond": refused(45)}
        kept = torch.ones(20 * 250_000)
        limit.refresh()
        found |= {"within_rest": refused(15), "beyond_rest": refused(25)}
        with limit.reserve(15_000_000):
            found |= {"reserved": refused(10), "within_reserved": refused(3)}
        found["released"] = refused(15)
        del kept
        limit.refresh()
        found["freed"] = refused(35)
        try:
            bytearray(80_000_000)
        except MemoryError as error:
            found["python"] = is_out_of_memory(error)
        try:
            with limit.reserve(15_000_000):
                raise KeyError
        except KeyError:
            found["reserved_after_error"] = limit.reserved_bytes
    found |= {"restored": resource.getrlimit(resource.RLIMIT_DATA) == before, "afterwards": refused(100)}
    found["lowered"] = inside[0] != before[0] and inside[1] == before[1]
    try:
        with MemoryLimit(40_000_000, baseline, torch.device("cpu")):
            raise KeyError
    except KeyError:
        found["restored_after_error"] = resource.getrlimit(resource.RLIMIT_DATA) == before
    with MemoryLimit(None, baseline, torch.device("cpu")) as free:
        found |= {"free": refused(100), "free_enforced": free.enforced, "free_refresh": free.refresh()}
    return found


@linux
def test_the_limit_refuses_what_lies_beyond_the_budget_and_is_lifted_afterwards(in_own_process):
    assert in_own_process["allocate_under_a_limit"] == {
        "unlimited": None, "enforced": True, "within": None, "beyond": True, "within_rest": None, "beyond_rest": True,
        "reserved": True, "within_reserved": None, "released": None, "freed": None, "python": True,
        "reserved_after_error": 0, "restored": True, "afterwards": None, "lowered": True, "restored_after_error": True,
        "free": None, "free_enforced": False, "free_refresh": 0,
    }  # fmt: skip


def reserve_address_space():
    import mmap

    import torch

    from snugfit.memory import MemoryLimit, prepare_process

    baseline = prepare_process(1)
    with MemoryLimit(40_000_000, baseline, torch.device("cpu")) as limit:
        before = limit.refresh()
        reserve = mmap.mmap(-1, 30_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        after = limit.refresh()
        torch.ones(35 * 250_000)
        return {"grown": after - before, "length": len(reserve)}


@linux
def test_address_space_that_is_reserved_but_not_used_costs_nothing_after_a_refresh(in_own_process):
    assert in_own_process["reserve_address_space"]["grown"] == pytest.approx(30 * MB, abs=MB)


def train_in_a_small_budget():
    import torch
    from torch import nn

    from snugfit.memory import MemoryLimit, is_out_of_memory, make_meter, prepare_process, release_memory

    baseline = prepare_process(1)
    meter = make_meter(baseline, torch.device("cpu"))
    sizes, peaks = [], []
    with MemoryLimit(60_000_000, baseline, torch.device("cpu")) as limit:
        for width in (8, 4096, 16):
            release_memory()
            limit.refresh()
            try:
                network = nn.Sequential(nn.Linear(1000, width), nn.ReLU(), nn.Linear(width, 1000))
                network(torch.ones(4, 1000)).sum().backward()
                sizes.append(width)
            except (RuntimeError, MemoryError) as error:
                sizes.append(-width if is_out_of_memory(error) else 0)
            network = None
            peaks.append(meter.mark())
    return {"sizes": sizes, "peak": max(peaks)}


@linux
def test_training_goes_on_smaller_after_a_refusal(in_own_process):
    seen = in_own_process["train_in_a_small_budget"]
    assert seen["sizes"] == [8, -4096, 16]
    assert seen["peak"] <= 60 * MB


def leave_holes_in_the_heap():
    from snugfit.memory import prepare_process, read_status, trim_heap

    prepare_process(1)
    blocks = [bytearray(16_000) for _ in range(4000)]
    full = read_status().anon
    del blocks[:-1]  # the last one keeps the heap from shrinking
    holes = read_status().anon
    trim_heap()
    return {"kept": full - holes, "given_back": full - read_status().anon}


@linux
def test_holes_in_the_heap_are_given_back(in_own_process):
    seen = in_own_process["leave_holes_in_the_heap"]
    assert seen["kept"] < 5 * MB and seen["given_back"] > 50 * MB


def use_a_heap_with_large_free_blocks():
    """Bytes that freed tensors leave resident below a block that lives, if free blocks there are held and if not."""
    import torch

    from snugfit.memory import heap, prepare_process, read_status

    def left_by_tensors():
        before = read_status().anon
        tensors = [torch.ones(size) for size in (1_000_000, 100_000, 5_000_000)]
        allocated = read_status().anon - before
        del tensors
        return {"allocated": allocated, "left": read_status().anon - before}

    prepare_process(1)
    heap.set_thresholds(heap.MMAP_THRESHOLD_BYTES * 512, 2**30)
    blocks = [torch.ones(1_000_000) for _ in range(10)]
    heap.set_thresholds(heap.MMAP_THRESHOLD_BYTES)
    del blocks[:-1]  # the last one keeps the heap from shrinking
    heap.trim_heap()
    free = left_by_tensors()
    before = read_status().anon
    heap.hold_free_blocks()
    held = {"taken": read_status().anon - before + free["left"], **left_by_tensors()}
    heap.free_held_blocks()
    return {"free": free, "held": held, "free again": left_by_tensors()}


@linux
def test_tensors_do_not_stay_resident_in_held_blocks(in_own_process):
    seen = in_own_process["use_a_heap_with_large_free_blocks"]
    assert min(each["allocated"] for each in seen.values()) > 23 * MB, seen
    assert min(seen[name]["left"] for name in ("free", "free again")) > 20 * MB, seen
    assert max(seen["held"]["taken"], seen["held"]["left"]) < MB / 5, seen


def prepare_twice():
    import threading

    import torch

    from snugfit.memory import prepare_process

    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = prepare_process(1), prepare_process(2)
    return {
        "drift": second.anon - first.anon,
        "threads": torch.get_num_threads(),
        "stack": threading.stack_size(),
        "random": bool(torch.equal(state, torch.get_rng_state())),
        "anon": first.anon,
        "data": first.data,
    }


@linux
def test_the_resting_process_is_the_same_each_time(in_own_process):
    seen = in_own_process["prepare_twice"]
    assert abs(seen["drift"]) < 2 * MB
    assert seen["threads"] == 2 and seen["stack"] == 512 * 1024 and seen["random"]
    assert 0 < seen["anon"] <= seen["data"]


def test_this_process_is_left_alone():
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


@linux
def test_file_maps_that_grow_hide_no_peak_from_the_meter(in_own_process):
    seen = in_own_process["measure_while_file_maps_grow"]
    assert seen["outside"] == pytest.approx(40 * MB, abs=MB)
    assert seen["by_mark_alone"] < 15 * MB, "the kernel's mark alone loses what file maps grew by"
    assert seen["marked"] >= seen["outside"] - 64 * 1024
    assert seen["marked"] == pytest.approx(40 * MB, abs=MB)
    assert seen["left"] == seen["threads"] - 1, "the sampler's thread ends with its meter"


@linux
def test_file_maps_that_are_dropped_do_not_count(in_own_process):
    seen = in_own_process["measure_while_file_maps_are_dropped"]
    assert seen["by_file_pages_now"] > 45 * MB, "the kernel's mark alone counts what was dropped"
    assert seen["marked"] == pytest.approx(20 * MB, abs=MB)


@linux
def test_status_reads_what_the_kernel_says():
    status = read_status()
    assert has_proc()
    assert 0 < status.anon <= status.high_water
    assert status.file > 0 and status.data >= status.anon


def test_without_proc_the_unique_set_stands_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr("snugfit.memory.process._STATUS", tmp_path / "none")
    assert read_status().anon > MB and read_status().data == 0
    meter = ProcessMeter(Baseline(0, 0))
    assert not meter.exact and not meter.metric.startswith("RssAnon")
    assert meter.mark() == meter.peak_bytes >= meter.current_bytes > MB


def test_the_meter_of_a_device():
    assert isinstance(make_meter(Baseline(0, 0), torch.device("cpu")), ProcessMeter)
    assert can_enforce(torch.device("cuda")) and can_enforce(torch.device("cpu")) == sys.platform.startswith("linux")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
            True,
        ),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("not enough memory: you tried to allocate 1GB"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (KeyError("x"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_a_limit_without_a_budget_changes_nothing():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with MemoryLimit(None, Baseline(0, 0), torch.device("cpu")) as limit, limit.reserve(5):
        with limit.allow_kernels():
            torch.ones(3) @ torch.ones(3)
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
        assert not limit.enforced


def exhausted():
    """Whether 8 kB can be allocated, and memory read, where the limit is reached."""
    import resource

    from snugfit.memory import read_status

    def works(read):
        try:
            return bool(read())
        except MemoryError:
            return False

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (read_status().data, most))
    held, size = [], 1 << 24
    while size >= 1 << 10:
        try:
            held.append(bytearray(size))
        except MemoryError:
            size //= 2
    found = [works(lambda: bytearray(8192)), works(read_status)]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return found


@linux
def test_memory_is_read_where_the_limit_is_reached(fresh_process):
    assert fresh_process(exhausted)["exhausted"] == [False, True]
