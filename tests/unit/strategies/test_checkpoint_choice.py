"""Which schedules are measured, which one is taken, and what that costs, from synthetic lines."""

from dataclasses import replace

import pytest
from fake_device import FakeMemory
from strategy_samples import HARDWARE, MB, line, profile, workload
from torch import nn

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.profile import ProbePoint
from snugfit._core.registry import find_config
from snugfit._core.serial import from_data, to_data
from snugfit.errors import UsageError
from snugfit.memory import device
from snugfit.strategies.checkpoint.candidates import MARGIN_BYTES, Candidate, MeasurementFilter
from snugfit.strategies.checkpoint.strategy import Checkpoint
from snugfit.strategies.full_network import network_cost
from snugfit.strategies.memory_estimates import RESERVED_BYTES, SAFETY
from snugfit.strategies.micro_batch import MicroBatching, line_name
from snugfit.strategies.recomputation.schedule import Schedule

PLAIN, SOME, LEAST = "network", "checkpoint:(0) 1", "checkpoint:(0-1) 2-3"
HELD = line_name(PLAIN, hold=True)
INFINITE = float("inf")


def make_candidate(text, seconds, batch_bytes):
    """64 images; gradients take 20 MB more, weights and optimizer state 10 MB."""
    return Candidate(Schedule.parse(text), seconds, 10 * MB, 20 * MB, batch_bytes // 64, batch_bytes)


CANDIDATES = [
    make_candidate("0-3", 1.0, 64 * MB),
    make_candidate("(0) 1-3", 1.1, 32 * MB),
    make_candidate("(0-1) 2-3", 1.3, 16 * MB),
]
FILTER = MeasurementFilter(CANDIDATES, workload(), True)


def available(headroom):
    """Bytes that leave ``headroom`` for a step, and nothing more."""
    return int(headroom * (1 + SAFETY.share)) + SAFETY.bytes + RESERVED_BYTES


def worth_measuring(lines, free, judge=FILTER):
    """What is worth measuring next, by number of the candidate and whether gradients are held."""
    return [
        (index, hold)
        for index, each in enumerate(judge.candidates)
        for hold in (False, True)
        if judge.is_worth_measuring(each, hold, lines, free)
    ]


def test_without_a_budget_the_plain_step_alone_is_measured():
    assert worth_measuring({}, INFINITE)[0] == (0, False)
    assert worth_measuring({PLAIN: line(10 * MB, MB)}, INFINITE) == []


def test_what_cannot_fit_is_not_measured_but_the_last_one():
    assert worth_measuring({}, available(50 * MB)) == [(0, True), (1, False), (1, True), (2, False), (2, True)]
    assert worth_measuring({}, available(27 * MB)) == [(2, False), (2, True)]
    for free in (available(5 * MB), 0, -5 * MB):
        assert worth_measuring({}, free) == [(2, False), (2, True)], "its floor gives the smallest budget"


def test_what_measuring_leaves_behind_is_not_what_the_last_one_lacks():
    """The last one needs 10.25 MB for a single image, 11.5 with workspace."""
    judge = replace(FILTER, left_bytes=15 * MB)
    assert worth_measuring({}, available(50 * MB), judge)[0] == (0, True)
    assert worth_measuring({}, available(41 * MB), judge) == [(2, False), (2, True)]


def test_slower_schedules_are_not_measured_once_one_fits():
    lines = {HELD: line(30 * MB, MB)}
    free = available(50 * MB) + MARGIN_BYTES
    assert worth_measuring(lines, free) == []
    points = (ProbePoint(2, 32 * MB, 10.0), ProbePoint(8, 38 * MB, 10.1))
    slow = {HELD: replace(lines[HELD], fixed_seconds=10.0, points=points)}
    assert worth_measuring(slow, free) == [(1, False)], "parts of 16 images cost ten seconds each, whatever their size"
    assert worth_measuring({**slow, CANDIDATES[1].probe: None}, free) == [(2, False)], (
        "where that did not fit, the next best"
    )
    assert worth_measuring({**slow, CANDIDATES[1].probe: line(10 * MB, 0.5 * MB, seconds=0.01)}, free) == [], (
        "or none, if it is quick"
    )


def test_what_takes_longer_to_measure_than_it_saves_is_not_measured():
    """Steps of 2 and 8 images take 20.1 s together; 64 images take 20.3 s in parts of 16, and 5.9 s at once."""
    points = (ProbePoint(2, 32 * MB, 10.0), ProbePoint(8, 38 * MB, 10.1))
    slow = {HELD: replace(line(30 * MB, MB), fixed_seconds=10.0, points=points)}
    free = available(50 * MB) + MARGIN_BYTES
    for batches, expected in ((4, []), (5, [(1, False)])):
        assert worth_measuring(slow, free, replace(FILTER, images=64 * batches)) == expected


def test_a_measured_schedule_corrects_what_the_others_are_expected_to_take():
    """Held steps take 25 ms an image. From 10 ms of a plain step follow 11 for the second schedule, 13 for the last."""
    lines, second = {PLAIN: line(10 * MB, MB), HELD: line(30 * MB, MB, seconds=0.05)}, CANDIDATES[1].probe
    free = available(50 * MB) + MARGIN_BYTES
    assert worth_measuring(lines, free)[0] == (1, False)
    assert worth_measuring({**lines, second: None}, free)[0] == (1, True), "nothing tells how long recomputing takes"
    slow = {**lines, second: line(10 * MB, 0.5 * MB, seconds=0.0245)}
    assert worth_measuring(slow, free) == [], "the last one is expected to take 13 elevenths of 24.5 ms"


def test_where_steps_of_few_images_are_slow_what_promises_most_is_measured():
    """A step takes 0.2 s and 10 ms each; 36 MB hold 4, 8 or 16 images with gradients, or 64 of the last candidate."""
    plain = replace(line(10 * MB, MB), fixed_seconds=0.2, sample_seconds=0.01)
    two = replace(line(30 * MB, MB), points=(ProbePoint(2, 32 * MB, 0.44),), fixed_seconds=0.0, sample_seconds=0.22)
    lines = {PLAIN: plain, HELD: two}
    assert worth_measuring(lines, available(36 * MB) + MARGIN_BYTES) == [(2, False)]
    assert (1, True) in worth_measuring({HELD: two}, available(36 * MB)), "nothing tells how slow few images are"


def test_a_single_point_does_not_predict_larger_batches():
    """Two images at a time take 5 s each: that is no reason to expect the same of 64."""
    lonely = replace(line(30 * MB, MB, seconds=5.0), points=(ProbePoint(2, 32 * MB, 10.0),))
    assert (1, False) in worth_measuring({HELD: lonely}, available(50 * MB) + MARGIN_BYTES)


def test_micro_batches_too_small_for_batch_norms_are_no_reason_to_measure_nothing_else():
    """35 MB hold 4 images of the plain step that holds gradients."""
    lines, free = {HELD: line(30 * MB, MB)}, available(35 * MB) + MARGIN_BYTES
    assert worth_measuring(lines, free) == []
    assert worth_measuring(lines, free, replace(FILTER, norms=True)) == [(1, True), (2, False), (2, True)]
    assert worth_measuring(lines, free - 3.9 * MB, replace(FILTER, norms=True)) == [(2, False), (2, True)], "8 images"
    assert worth_measuring(lines, available(50 * MB) + MARGIN_BYTES, replace(FILTER, norms=True)) == [], "16 images"


def test_what_fits_by_a_hair_is_measured_on():
    lines = {"checkpoint:(0) 1-3": line(10 * MB, 0.5 * MB)}
    assert (2, False) not in worth_measuring(lines, available(42.1 * MB) + MARGIN_BYTES)
    assert (2, False) in worth_measuring(lines, available(42.1 * MB))


def propose(lines, budget, **changes):
    found = profile(lines, units="abcd", floors={name: 9 * MB for name in lines})
    for strategy in Checkpoint(**changes).propose(workload(), found, HARDWARE, budget):
        cost = strategy.estimate(workload(), found, HARDWARE)
        assert budget.memory_bytes is None or cost.peak_bytes <= budget.memory_bytes
        assert from_data(Checkpoint, to_data(strategy)) == strategy
        return strategy, cost
    return None


LINES = {
    PLAIN: line(10 * MB, MB),
    HELD: line(30 * MB, MB, seconds=0.03),
    LEAST: line(10 * MB, 0.25 * MB, seconds=0.013),
}


def test_with_enough_headroom_nothing_is_recomputed():
    strategy, cost = propose(LINES, Budget())
    assert strategy == Checkpoint(64, 1, "0-3")
    assert cost == network_cost(profile(LINES, units="abcd"), PLAIN, workload(), MicroBatching(64))


def test_the_faster_of_recomputation_and_accumulation_is_taken():
    """Accumulating costs 0.015 s an image, recomputing 0.013."""
    strategy, _ = propose(LINES, Budget(available(60 * MB)))
    assert strategy == Checkpoint(64, 1, "(0-1) 2-3")
    quick = {**LINES, HELD: line(30 * MB, MB, seconds=0.022)}
    strategy, _ = propose(quick, Budget(available(60 * MB)))
    assert strategy == Checkpoint(22, 3, "0-3", accumulate=True)
    assert propose(quick, Budget(available(60 * MB)), accumulate=False)[0].recomputation == "(0-1) 2-3"


def test_the_effective_batch_counts_more_than_speed():
    quick = {PLAIN: line(10 * MB, MB), LEAST: line(10 * MB, 0.25 * MB, seconds=0.1)}
    strategy, _ = propose(quick, Budget(available(50 * MB)))
    assert strategy == Checkpoint(64, 1, "(0-1) 2-3")
    strategy, _ = propose(quick, Budget(available(20.1 * MB)))
    assert strategy == Checkpoint(40, 1, "(0-1) 2-3"), "the largest batch that fits, where none accumulates to 64"


@pytest.mark.parametrize(
    ("norms", "batch_size", "taken"), [(False, 64, "0-3"), (True, 64, "(0-1) 2-3"), (True, 4, "0-3")]
)
def test_batch_norms_of_few_images_are_worth_no_time(norms, batch_size, taken):
    """36 MB hold 4 or 5 images of the plain step, which is the faster one, and all by recomputation."""
    lines = {PLAIN: line(10 * MB, 6 * MB), HELD: line(15 * MB, 4 * MB), LEAST: line(10 * MB, 0.25 * MB, seconds=0.1)}
    found = profile(lines, units="abcd")
    found = replace(found, units=tuple(replace(unit, tracks=norms) for unit in found.units))
    work = workload(batch_size=batch_size)
    (strategy,) = Checkpoint().propose(work, found, HARDWARE, Budget(available(36 * MB)))
    assert strategy.recomputation == taken


@pytest.mark.parametrize(("device", "on_host"), [("cpu", 0), ("cuda:0", 128)])
def test_what_pages_takes_disk_or_the_memory_of_a_gpus_host(device, on_host):
    lines = {PLAIN: line(10 * MB, MB), "checkpoint:[0-1] 2-3 pages 1000000": line(5 * MB, 0.1 * MB)}
    found, hardware = profile(lines, units="abcd"), replace(HARDWARE, device=device)
    options = Checkpoint(paging_folder="runs")
    (strategy,) = options.propose(workload(), found, hardware, Budget(available(20 * MB)))
    cost = strategy.estimate(workload(), found, hardware)
    assert (strategy.recomputation, strategy.micro_batch) == ("[0-1] 2-3", 64)
    assert (cost.host_bytes, cost.storage_bytes) == (on_host * MB, 0 if on_host else 64 * MB)
    where = "host memory" if on_host else "disk"
    (sentence,) = find_config("checkpoint").explanation(to_data(strategy), "abcd")
    assert sentence.startswith(f"Each step writes up to 64.0 MB of activations to {where} and reads")


@pytest.mark.parametrize(("device", "kind"), [("cpu", "storage"), ("cuda:0", "host_memory")])
def test_where_there_is_no_room_for_pages_a_schedule_without_them_is_proposed_too(device, kind):
    lines = {"checkpoint:[0-1] 2-3 pages 1000000": line(5 * MB, 0.1 * MB), LEAST: line(5 * MB, 0.2 * MB, seconds=0.1)}
    found, hardware = profile(lines, units="abcd"), replace(HARDWARE, device=device)
    for room, proposed in ((200 * MB, ["[0-1] 2-3"]), (10 * MB, ["[0-1] 2-3", "(0-1) 2-3"])):
        budget = Budget(available(20 * MB), **{kind: room})
        strategies = Checkpoint(paging_folder="runs").propose(workload(), found, hardware, budget)
        assert [each.recomputation for each in strategies] == proposed


@pytest.mark.parametrize("unified", [False, True])
def test_a_gpu_that_shares_the_memory_of_its_host_pages_nothing(unified, monkeypatch):
    monkeypatch.setattr(device, "_at_rest", {})
    monkeypatch.setitem(device.KINDS, "cuda", lambda _: FakeMemory(unified=unified))
    chain = Chain.from_module(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)).to("meta"), (1, 8, 8))
    reasons = Checkpoint().validate(workload(activations="paged"), chain, replace(HARDWARE, device="cuda:0"))
    assert reasons == (
        ["--activations paged moves activations to host memory, which this GPU shares"] if unified else []
    )


def test_nothing_fits_and_the_least_floor_is_named():
    assert propose(LINES, Budget(5 * MB)) is None
    found = profile(LINES, floors={PLAIN: 90 * MB, LEAST: 20 * MB, "block:0": MB})
    assert Checkpoint().shortfall(workload(), found, HARDWARE, Budget(5 * MB)).smallest_bytes == 33 * MB


def test_a_plan_without_a_schedule_cannot_be_taken_up():
    with pytest.raises(UsageError, match="is no schedule"):
        Checkpoint().estimate(workload(), profile(LINES), HARDWARE)
