"""What the heaps of new processes keep of freed memory, and what they give back."""

import sys

import pytest


def steps_of_one_mebibyte():
    """Faults of ten steps that allocate 16 tensors of 1 MiB, without and with keeping, and bytes that stay."""
    import resource

    import torch

    from snugfit.memory import MemoryLimit, make_meter, prepare_process, read_status
    from snugfit.memory.freed_memory import OBSERVED_STEPS, FreedMemory

    def step():
        return [torch.ones(2**18) for _ in range(16)]

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    baseline, device = prepare_process(1), torch.device("cpu")
    resting, freed = read_status().anon, FreedMemory(make_meter(baseline, device), MemoryLimit(None, baseline, device))
    freed.begin(10**9)
    with freed.kept(steps=True):
        without = faults()
        for _ in range(OBSERVED_STEPS):
            freed.after_step()
        step()
        kept = faults()
        during = read_status().anon - resting
    return {"without": without, "kept": kept, "during": during, "after": read_status().anon - resting}


@pytest.mark.skipif(sys.platform != "linux", reason="the thresholds are glibc's")
def test_steps_find_their_memory_mapped(fresh_process):
    found = fresh_process(steps_of_one_mebibyte)["steps_of_one_mebibyte"]
    assert found["without"] > 10 * found["kept"]
    assert found["during"] > 15 * 2**20 > 2**21 > found["after"]


def epochs_with_ample_room():
    """Bytes that stay of a tensor of 40 MiB between two epochs, and after them."""
    import torch

    from snugfit.memory import MemoryLimit, make_meter, prepare_process, read_status
    from snugfit.memory.freed_memory import FreedMemory

    def epoch():
        with freed.kept(steps=True):
            for _ in range(3):
                torch.ones(10 * 2**20)
                freed.after_step()

    baseline, device = prepare_process(1), torch.device("cpu")
    resting, freed = read_status().anon, FreedMemory(make_meter(baseline, device), MemoryLimit(None, baseline, device))
    freed.begin(10**9, 4 * 10**8)
    epoch()
    between = read_status().anon - resting
    epoch()
    freed.close()
    return {"between": between, "after": read_status().anon - resting}


@pytest.mark.skipif(sys.platform != "linux", reason="the thresholds are glibc's")
def test_with_ample_room_memory_stays_between_epochs_in_blocks_of_any_size(fresh_process):
    """Blocks of 32 MiB and more are mapped, and returned one by one, unless the heap serves them."""
    found = fresh_process(epochs_with_ample_room)["epochs_with_ample_room"]
    assert found["between"] >= 40 * 2**20 > 2**21 > found["after"]


def blocks_held_while_none_is_mapped():
    """Bytes by which the heap grows where free blocks are held although large blocks were not mapped."""
    from snugfit.memory import prepare_process, read_status
    from snugfit.memory.heap import hold_free_blocks, map_large_blocks

    prepare_process(1)
    before = read_status().data
    map_large_blocks(False)
    hold_free_blocks()
    return {"grown": read_status().data - before}


@pytest.mark.skipif(sys.platform != "linux", reason="the thresholds are glibc's")
def test_holding_free_blocks_makes_none(fresh_process):
    """It ends where a block is mapped: the heap would grow until an allocation fails."""
    assert fresh_process(blocks_held_while_none_is_mapped)["blocks_held_while_none_is_mapped"]["grown"] < 2**20


def more_than_a_gibibyte():
    """Bytes of a heap that stay when all 72 tensors of 16 MiB are freed."""
    import torch

    from snugfit.memory import prepare_process, read_status
    from snugfit.memory.freed_memory import KEEP_ALL_BYTES, KEPT_BLOCK_BYTES
    from snugfit.memory.heap import set_thresholds

    prepare_process(1)
    resting = read_status().anon
    set_thresholds(KEPT_BLOCK_BYTES, KEEP_ALL_BYTES)
    tensors = [torch.ones(2**22) for _ in range(72)]
    tensors.clear()
    return {"stays": read_status().anon - resting}


@pytest.mark.skipif(sys.platform != "linux", reason="the thresholds are glibc's")
def test_a_large_heap_is_kept_too(fresh_process):
    """glibc gave back more than 1 GiB at the heap's end, so that MobileNetV2 at 224 pixels mapped it in every step."""
    assert fresh_process(more_than_a_gibibyte)["more_than_a_gibibyte"]["stays"] > 71 * 2**24


def steps_at_the_limit():
    """Peaks of steps of a network in a phase that may take 1.05 times what they need, and faults, without and with."""
    import resource

    import torch
    from torch import nn

    from snugfit.memory import MemoryLimit, make_meter, prepare_process
    from snugfit.memory.freed_memory import FreedMemory

    baseline, device = prepare_process(1), torch.device("cpu")
    network = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(12)])
    images = torch.ones(16, 8, 64, 64).to(memory_format=torch.channels_last)

    def steps(allowed):
        meter, limit = make_meter(baseline, device), MemoryLimit(None, baseline, device)
        freed = FreedMemory(meter, limit)
        freed.begin(allowed)
        with freed.kept(steps=True):
            for _ in range(6):
                network(images).sum().backward()
                freed.after_step()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(30):
                network(images).sum().backward()
                freed.after_step()
        return meter.mark(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    network(images).sum().backward()
    least, without = steps(0)
    return {"least": least, "without": without, "tight": steps(int(least * 1.05)), "ample": steps(least * 3)}


@pytest.mark.skipif(sys.platform != "linux", reason="the thresholds are glibc's")
def test_a_peak_stays_below_what_is_allowed_and_the_more_is_allowed_the_less_is_mapped_again(fresh_process):
    found = fresh_process(steps_at_the_limit)["steps_at_the_limit"]
    (tight, some), (ample, few) = found["tight"], found["ample"]
    assert tight <= found["least"] * 1.05 and ample <= found["least"] * 3
    assert few < found["without"] / 10 and some < found["without"]


def huge_pages_of_this_process():
    """Whether the process may have huge pages, before and after it is prepared."""
    import ctypes

    from snugfit.memory import prepare_process

    def allowed():
        return ctypes.CDLL(None).prctl(42, 0, 0, 0, 0) == 0  # PR_GET_THP_DISABLE

    ctypes.CDLL(None).prctl(41, 0, 0, 0, 0)  # PR_SET_THP_DISABLE, which the parent may have set
    before = allowed()
    prepare_process(1)
    return {"before": before, "after": allowed()}


@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")
def test_a_prepared_process_has_no_huge_pages(fresh_process):
    """The first byte that is written in one makes 2 MiB resident."""
    assert fresh_process(huge_pages_of_this_process)["huge_pages_of_this_process"] == {"before": True, "after": False}
