"""Which batch the whole network trains at, and what that costs, from made-up lines."""

import functools
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategy_samples import HARDWARE, MB, facts, line, profile, workload
from torch import nn

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.plan import Shortfall
from snugfit._core.profile import ProbePoint
from snugfit._training.network import NetworkTrainer
from snugfit.memory import fit_line
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.backprop.strategy import Backprop
from snugfit.strategies.full_network import batch_settings, network_cost, network_shortfall
from snugfit.strategies.memory_estimates import (
    DRIFT_BYTES,
    LEAST_RESERVED_BYTES,
    OWN_SAFETY,
    RESERVED_BYTES,
    SAFETY,
    TENSOR_TO_PROCESS,
    passing_kernel_bytes,
    reserved_bytes,
    smallest_budget,
    step_headroom,
    with_safety,
)
from snugfit.strategies.micro_batch import MicroBatching, divisors, line_name
from snugfit.strategies.recomputation.paging import recomputing_forward
from snugfit.strategies.recomputation.schedule import Schedule


def settings(budget, plain=(10 * MB, MB), holding=(20 * MB, MB), accumulate=True, smallest=1, base=0, **changes):
    lines = {"network": line(*plain, smallest=smallest)}
    if holding:
        lines["network:accumulate"] = line(*holding, seconds=0.02, smallest=smallest)
    found = batch_settings(
        workload(**changes), profile(lines, base=base), Budget(budget), "network", accumulate=accumulate
    )
    return found and (found.micro_batch, found.micro_batches, found.holds_gradients)


ONE_SAMPLE = math.ceil(112 * (1 + SAFETY.share) + (SAFETY.bytes + RESERVED_BYTES + DRIFT_BYTES) / MB) * MB
"""Budget of a step with 100 MB of tensors: 12 % more for the process, safety, held back, drift, up to the next MB."""


def budget_for(step_bytes):
    """A budget whose room for a step is just above ``step_bytes``."""
    return int(step_bytes * (1 + SAFETY.share)) + SAFETY.bytes + RESERVED_BYTES + 10


def test_safety_and_its_inverse():
    assert with_safety(10 * MB, 90 * MB) == pytest.approx(101_500_000 + SAFETY.bytes, abs=1)
    assert step_headroom(Budget(101_500_000 + SAFETY.bytes + RESERVED_BYTES), 10 * MB) == pytest.approx(90 * MB)
    assert step_headroom(Budget(), 10 * MB) == float("inf")
    assert smallest_budget(profile({}), 100 * MB) == ONE_SAMPLE


@given(st.integers(3 * MB, 10**10), st.integers(0, 10**9))
def test_what_uses_the_whole_room_is_predicted_to_fit(budget, resident):
    headroom = step_headroom(Budget(budget), resident)
    assert with_safety(resident, headroom) <= budget - RESERVED_BYTES + 1
    assert with_safety(resident, headroom) >= budget - RESERVED_BYTES - 2


def test_parts_of_a_batch_are_measured_only_if_the_whole_may_not_fit():
    """A whole batch of 64 images takes 74 MB."""
    with torch.device("meta"):
        chain = Chain.from_module(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 3)), (3, 2, 2))
    _, held = Backprop().probes(workload(), chain, HARDWARE)
    lines = {"network": line(10 * MB, MB)}
    assert held.name == "network:accumulate" and held.batch_limit == 64
    assert held.needed({"network": None}, math.inf), "nothing is known of a plain step"
    assert held.needed(lines, available=budget_for(74 * MB)), "which measuring may leave too little memory for"
    assert not held.needed(lines, available=budget_for(74 * MB / 0.9))
    assert not held.needed(lines, math.inf)


def test_a_plain_step_is_measured_only_if_the_whole_batch_may_fit_or_no_micro_batch_does():
    with torch.device("meta"):
        chain = Chain.from_module(nn.Sequential(nn.Conv2d(3, 64, 1), nn.Flatten(), nn.Linear(4096, 10)), (3, 8, 8))
    plain, held = Backprop().probes(workload(), chain, HARDWARE)
    whole, few = plain.floor(64), held.floor(1)
    assert few < whole, "64 images need more than one with gradients"
    assert plain.needed({}, whole) and plain.needed({}, math.inf)
    room = budget_for(few * TENSOR_TO_PROCESS / 0.9)
    large = replace(plain, needed=functools.partial(plain.needed.func, lambda batch: 10**9, *plain.needed.args[1:]))
    assert not large.needed({}, room + 10), "one image surely fits, and the whole batch cannot"
    assert large.needed({}, budget_for(few)), "with held gradients not even one image may fit"
    assert large.needed({held.name: None}, 10**8), "with them nothing fitted"
    assert large.needed({held.name: line(50 * MB, MB)}, 50 * MB) and not large.needed(
        {held.name: line(MB, MB)}, 50 * MB
    )
    (alone,) = Backprop(accumulate=False).probes(workload(), chain, HARDWARE)
    assert alone.needed is None


def test_without_a_plain_step_the_smallest_budget_follows_from_held_gradients():
    found = replace(profile({"network:accumulate": line(10 * MB, MB)}), floors={"network:accumulate": 100 * MB})
    lack = Backprop().shortfall(workload(), found, HARDWARE, Budget(MB))
    assert lack == network_shortfall(found, 100 * MB, Budget(MB), workload())


@given(st.integers(1, 600))
def test_divisors(number):
    assert list(divisors(number)) == [d for d in range(1, number + 1) if number % d == 0]


def test_the_whole_batch_where_it_fits():
    assert settings(None) == (64, 1, False)
    assert settings(budget_for(74 * MB + 2)) == (64, 1, False)


def test_else_it_is_accumulated_to_exactly():
    """84 MB would hold 64 images with held gradients; 60 MB hold 40, two parts of which have 32."""
    assert settings(budget_for(60 * MB + 2)) == (32, 2, True)
    assert settings(budget_for(50 * MB + 2)) == (22, 3, True), "22, 21 and 21 images"
    assert settings(budget_for(21 * MB + 2)) == (1, 64, True)


def test_else_the_largest_without_accumulation():
    """20.5 MB hold no image with held gradients, but 10 without."""
    assert settings(budget_for(20.5 * MB)) == (10, 1, False)


def test_nothing_fits():
    assert settings(budget_for(10.5 * MB)) is None


def test_without_accumulation_the_largest_batch_is_taken():
    assert settings(budget_for(60 * MB + 2), accumulate=False, holding=None) == (50, 1, False)


def test_memory_in_use_before_counts():
    assert settings(budget_for(74 * MB + 2), base=30 * MB) == (22, 3, True)


@pytest.mark.parametrize(
    ("batch_size", "tracks", "budget", "room", "size"),
    [
        (64, False, 43, 32.5, 7), (64, True, 43, 32.5, 8), (20, False, 43, 32.5, 7), (20, True, 43, 32.5, 20),
        (6, True, 43, 32.5, 6), (12, True, 26.5, 30, 4), (16, True, 28.5, 30, 8),
    ],
)  # fmt: skip
def test_smaller_micro_batches_where_they_leave_room_for_freed_memory(batch_size, tracks, budget, room, size):
    """Half of a step is for mapping memory: with 43 MB 7 images save all of it, 8 nine tenths and 16 two fifths.

    Batch norms get no fewer than 8 images for that, or two thirds of the 6 that fit into another budget, and a batch
    that fits is not divided.
    """
    lines = {}
    for name, passes in (("network", 1), ("network:accumulate", 2)):
        points = [ProbePoint(each, (20 + each) * MB, 0.01 * passes * each, 0.005 * passes * each) for each in (2, 64)]
        lines[name] = replace(fit_line(name, points), room_bytes=int(room * MB))
    found = replace(profile(lines), units=(replace(facts(), tracks=tracks),))
    work = workload(batch_size=batch_size)
    made = batch_settings(work, found, Budget(budget_for(int(budget * MB))), "network", accumulate=True)
    assert made.micro_batch == size and made.images(work) == batch_size


def test_no_more_images_than_there_are():
    assert settings(None, train_count=20) == (20, 1, False)


def test_a_micro_batch_never_falls_below_what_batch_norm_needs():
    """Two of five images fit with held gradients; a third part has one image."""
    assert settings(budget_for(22 * MB + 2), batch_size=5, smallest=2, plain=(20 * MB, MB)) == (2, 1, False)
    assert settings(budget_for(22 * MB + 2), batch_size=5, smallest=1, plain=(20 * MB, MB)) == (2, 3, True)


def test_accumulating_a_single_whole_batch_is_not_accumulating():
    """The plain line was measured a little above the one that holds gradients: noise must not undo the check."""
    assert settings(budget_for(73.5 * MB), plain=(10 * MB, MB), holding=(9 * MB, MB)) == (32, 2, True)


@given(
    st.integers(3 * MB, 200 * MB), st.integers(1, 130), st.integers(1, 300), st.integers(1, 2),
    st.integers(0, 40 * MB), st.integers(1000, 3 * MB), st.booleans(),
)  # fmt: skip
def test_what_is_chosen_fits(budget, batch_size, train_count, smallest, fixed, sample, accumulate):
    lines = {"network": line(fixed, sample, smallest=smallest)}
    lines["network:accumulate"] = line(1.3 * fixed, 1.1 * sample, smallest=smallest)
    work = workload(batch_size=batch_size, train_count=train_count)
    found = batch_settings(work, profile(lines), Budget(budget), "network", accumulate=accumulate)
    if found is None:
        assert lines["network"].largest_batch(step_headroom(Budget(budget), 0), min(batch_size, train_count)) == 0
        return
    micro, count = found.micro_batch, found.micro_batches
    assert smallest <= micro <= min(batch_size, train_count) and found.accumulate == accumulate
    batch = min(batch_size, train_count)
    assert count == 1 or max(map(len, np.array_split(range(batch), count))) == micro
    assert count == 1 or min(map(len, np.array_split(range(batch), count))) >= smallest
    if count > 2:
        fewer, room = math.ceil(batch / (count - 1)), step_headroom(Budget(budget), 0)
        assert lines["network:accumulate"].bytes_at(fewer) > room, "fewer micro-batches do not fit"
    cost = network_cost(profile(lines), "network", work, found)
    assert cost.peak_bytes <= budget


def test_cost_by_hand():
    """1000 images in 15 steps of 64, at 0.01 s an image, and 200 validation images at 0.3 of that."""
    found = profile({"network": line(10 * MB, MB)}, base=5 * MB)
    cost = network_cost(found, "network", workload(), MicroBatching(64))
    epoch = 15 * 0.64 + 0.3 * 200 * 0.01
    assert cost.peak_bytes == int((5 * MB + 74 * MB + 1) * (1 + SAFETY.share)) + SAFETY.bytes
    assert cost.seconds_per_epoch == pytest.approx(epoch) and cost.seconds == pytest.approx(3 * epoch)
    (phase,) = cost.phases
    assert (phase.batch_size, phase.units, phase.storage_bytes, cost.storage_bytes) == (64, ("a", "b"), 0, 0)
    assert phase.peak_bytes == cost.peak_bytes and phase.seconds == cost.seconds


def test_norms_that_track_cost_a_pass_over_some_training_images():
    found = profile({"network": line(10 * MB, MB)})
    without = network_cost(found, "network", workload(), MicroBatching(64))
    tracking = replace(found, units=(found.units[0], replace(found.units[1], tracks=True)))
    cost = network_cost(tracking, "network", workload(), MicroBatching(64))
    assert cost.seconds_per_epoch - without.seconds_per_epoch == pytest.approx(0.3 * 256 * 0.01)
    assert cost.peak_bytes == without.peak_bytes


def test_cost_of_accumulation_by_hand():
    """A probe that holds gradients runs two micro-batches: half its seconds are one's."""
    found = profile({"network": line(10 * MB, MB), "network:accumulate": line(20 * MB, MB, seconds=0.024)})
    cost = network_cost(found, "network", workload(), MicroBatching(32, 2))
    assert cost.seconds_per_epoch == pytest.approx(15 * 2 * 32 * 0.012 + 0.3 * 200 * 0.012)
    assert cost.peak_bytes == int((52 * MB + 1) * (1 + SAFETY.share)) + SAFETY.bytes


def test_two_sizes_of_micro_batches_have_kernels_of_their_own():
    """64 images in three parts: 22 and 21, the larger of which was measured; with 16 at once there is one size."""
    held = replace(line(20 * MB, MB), shape_bytes=3.0 * MB)
    points = (*held.points, ProbePoint(22, 42 * MB, 0.22))
    lines = {"network": line(10 * MB, MB), "network:accumulate": replace(held, points=points)}
    three, four = MicroBatching(22, 3), MicroBatching(16, 4)
    assert three.step_bytes(held, workload()) == pytest.approx(48 * MB, abs=2), "neither was measured"
    assert three.step_bytes(lines["network:accumulate"], workload()) == pytest.approx(45 * MB, abs=2)
    assert four.step_bytes(held, workload()) == pytest.approx(39 * MB, abs=2)
    for room, wanted in ((45 * MB + 2, three), (45 * MB - 100, four)):
        found = batch_settings(workload(), profile(lines), Budget(budget_for(room)), "network", accumulate=True)
        assert found == wanted
    cost = network_cost(profile(lines), "network", workload(epochs=1), three)
    assert cost.peak_bytes == int((45 * MB + 1) * (1 + SAFETY.share)) + SAFETY.bytes
    assert cost.seconds_per_epoch == pytest.approx((960 + 0.3 * 200) * 0.11 / 22), "64 images a step, not 66"


def test_steps_that_hold_gradients_have_the_kernels_that_the_others_showed():
    """Whichever is measured second finds them in memory."""
    held = line_name("network", hold=True)
    plain, made = replace(line(10 * MB, MB), shape_bytes=3 * MB), MicroBatching(20, 2, accumulate=True)
    costs = [
        network_cost(profile({"network": plain, held: replace(plain, shape_bytes=size)}), "network", workload(), made)
        for size in (0, 3 * MB)
    ]
    assert costs[0].peak_bytes == costs[1].peak_bytes


def test_weights_in_bfloat16_count_the_holes_that_their_float32_copies_leave_in_the_heap():
    """26 kB for each of 40 tensors: in the predicted peak, in what is left for a step, and in the smallest budget."""
    found = profile({"network": line(10 * MB, MB)})
    found = replace(found, units=tuple(replace(unit, tensors=20) for unit in found.units))
    few, whole = (workload(weight_dtype=dtype) for dtype in ("bfloat16", "float32"))
    peaks = [network_cost(found, "network", work, MicroBatching(64)).peak_bytes for work in (few, whole)]
    assert peaks[0] - peaks[1] == pytest.approx(40 * 26_000 * (1 + SAFETY.share), abs=1)
    needs = [network_shortfall(found, 9 * MB, Budget("1MB"), work).smallest_bytes for work in (few, whole)]
    assert needs[0] - needs[1] == MB, "1.04 MB, in whole MB"
    batches = [
        batch_settings(work, found, Budget("60MB"), "network", accumulate=False).micro_batch for work in (few, whole)
    ]
    assert batches[1] - batches[0] == 1, "an image takes 1 MB"


def test_reasons_name_the_smallest_budget():
    found = profile({}, floors={"network": 100 * MB})
    lack = network_shortfall(found, found.floors["network"], Budget("50MB"), workload())
    assert lack == Shortfall((f"one sample needs {ONE_SAMPLE // MB} MB",), ONE_SAMPLE)
    larger = network_shortfall(found, found.floors["network"], Budget("200MB"), workload())
    assert larger.smallest_bytes == 201 * MB, "what was measured not to fit does not fit"
    several = workload(task="multi-label", val_count=100_000)
    assert (
        network_shortfall(found, found.floors["network"], Budget("50MB"), several).smallest_bytes > ONE_SAMPLE + 5 * MB
    )


def test_backprop_proposes_what_the_settings_say():
    kind, probe = Backprop, "network"
    found = profile(
        {probe: line(10 * MB, MB, name=probe), line_name(probe, hold=True): line(20 * MB, MB)}, floors={probe: MB}
    )
    budget = Budget(budget_for(60 * MB + 2))
    (proposal,) = kind().propose(workload(), found, HARDWARE, budget)
    assert proposal == kind(32, 2, accumulate=True)
    cost = proposal.estimate(workload(), found, HARDWARE)
    assert (
        cost == network_cost(found, probe, workload(), MicroBatching(32, 2)) and cost.peak_bytes <= budget.memory_bytes
    )
    assert list(kind().propose(workload(), found, HARDWARE, Budget(5 * MB))) == []
    assert kind().shortfall(workload(), found, HARDWARE, Budget(5 * MB)).smallest_bytes == 11 * MB, (
        "1.12 + 2.5 + 5 + 2 MB, rounded up"
    )
    assert list(kind().propose(workload(), profile({}, floors={probe: MB}), HARDWARE, budget)) == []


def test_kernels_of_smaller_last_batches_count_where_epochs_follow():
    """Of 50 validation and 256 training images, 2 and 0 are left over at 8 or 16 at once, 18 and 0 at 32."""
    work = workload(val_count=50, train_count=300, epochs=2)
    assert [passing_kernel_bytes(work, batch, 3 * MB) for batch in (1, 8, 32)] == [0, MB, MB]
    assert passing_kernel_bytes(replace(work, epochs=1), 8, 3 * MB) == 0


@pytest.mark.parametrize(("state", "passing", "wanted"), [(0, 0, 5.0), (3, 0, 2.0), (9, 0, 1.0), (9, 2, 3.03)])
def test_what_a_dry_run_reserves_fits_where_there_is_no_optimizer_state_yet(state, passing, wanted):
    assert reserved_bytes(state * MB, passing * MB) == pytest.approx(wanted * MB)


def test_a_budget_is_used_up_to_a_megabyte_with_much_optimizer_state():
    """10 MB and one per image; 40 MB of weights with as much momentum."""
    units = (replace(facts(weights=40 * MB), trained=10 * MB),)
    made = replace(profile({"network": line(10 * MB, MB)}), units=units)
    budget = Budget(int(50 * MB * (1 + SAFETY.share)) + SAFETY.bytes + LEAST_RESERVED_BYTES + 10)
    work = workload(epochs=1, batch_size=40)
    assert batch_settings(work, made, budget, "network", accumulate=False).micro_batch == 40
    few = replace(made, units=(replace(units[0], trained=0),))
    assert batch_settings(work, few, budget, "network", accumulate=False).micro_batch == 36


@pytest.mark.parametrize(("activations", "recomputes"), [("exact", False), ("int8", False), ("exact", True)])
def test_clipped_steps_have_no_optimizer_state_at_the_peak_of_the_first(activations, recomputes):
    """Their gradients are applied behind it, however feature maps are kept."""
    made = replace(profile({"network": line(10 * MB, MB)}), units=(replace(facts(weights=40 * MB), trained=10 * MB),))
    work = workload(epochs=1, batch_size=40, activations=activations, clip_norm=1.0)
    least = int(50 * MB * (1 + SAFETY.share)) + SAFETY.bytes + LEAST_RESERVED_BYTES + 10
    found = batch_settings(work, made, Budget(least), "network", accumulate=False, recomputes=recomputes)
    assert found.micro_batch == 40


@pytest.mark.parametrize(("activations", "recomputes"), [("int8", False), ("int4", False), ("exact", True)])
def test_a_peak_at_the_end_of_the_backward_pass_has_optimizer_state_already(activations, recomputes):
    """40 MB of momentum; accumulated gradients are applied behind the peak of their step."""
    lines = {"network": line(10 * MB, MB), "network:accumulate": line(10 * MB, MB)}
    made = replace(profile(lines), units=(replace(facts(weights=40 * MB), trained=10 * MB),))
    work = workload(epochs=1, batch_size=40, activations=activations)
    least = int(50 * MB * (1 + SAFETY.share)) + SAFETY.bytes + LEAST_RESERVED_BYTES + 10

    def found(budget, accumulate):
        return batch_settings(work, made, Budget(budget), "network", accumulate=accumulate, recomputes=recomputes)

    assert found(least, False).micro_batch == 36
    assert found(least + RESERVED_BYTES - LEAST_RESERVED_BYTES, False).micro_batch == 40
    held = found(least - MB, True)
    assert (held.micro_batch, held.micro_batches) == (20, 2)


def first_and_later_peaks(activations, text, clip_norm=None):
    """Peak tensor bytes of a first step and of the next one, and bytes of optimizer state, of a deep network."""
    layers, width = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()], 8
    for stride in (1, 2, 1, 2, 1, 2, 1):
        layers += [nn.Conv2d(width, width * stride, 3, stride, 1), nn.BatchNorm2d(width * stride), nn.ReLU()]
        width *= stride
    chain = Chain.from_module(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10)).to("meta"), (3, 32, 32))
    forward = recomputing_forward([unit.module for unit in chain.all_units], Schedule.parse(text))
    module = chain.to_module()
    trainer = NetworkTrainer(module, forward, workload(activations=activations, clip_norm=clip_norm))

    def step():
        trainer.step(torch.empty(16, 3, 32, 32, device="meta"), torch.empty(16, dtype=torch.long, device="meta"))

    first = tensor_peak_bytes(step, [module])
    state = [tensor for tensor in trainer.optimizers.state().values() if isinstance(tensor, torch.Tensor)]
    return first, tensor_peak_bytes(step, [module, *state]), sum(tensor.nbytes for tensor in state)


@pytest.mark.parametrize(
    ("activations", "schedule", "least", "most"),
    [
        ("exact", "0-8", 0.8, 1.0),
        ("int8", "0-8", 0.0, 0.5),
        ("int4", "0-8", 0.0, 0.5),
        ("exact", "(0) (1) (2-3) 4-8", 0.0, 0.1),
    ],
)
def test_a_first_step_lacks_its_state_at_the_peak_of_plain_backpropagation_alone(activations, schedule, least, most):
    first, later, state = first_and_later_peaks(activations, schedule)
    assert least * state <= later - first <= most * state


@pytest.mark.parametrize("schedule", ["0-8", "(0) (1) (2-3) 4-8"])
def test_a_first_step_that_clips_lacks_its_state_at_any_peak(schedule):
    first, later, state = first_and_later_peaks("exact", schedule, clip_norm=1.0)
    assert 0.8 * state <= later - first <= state


def test_tiles_of_a_whole_batch_fit_without_counting_on_absent_optimizer_state():
    """Their gradients are applied at once, and what they compute again moves the peak to the end of the step."""
    lines = {"network": line(40 * MB, 40 * MB), "network:exact": line(10 * MB, MB), "network:accumulate": line(1, 1)}
    found = replace(profile(lines), units=(replace(facts(), trained=10 * MB),))
    whole = Backprop(batch_norm="exact", whole_batch=True, scratch_bytes=3)
    for room, size, parts in ((26 * MB, 16, 4), (26 * MB - 1000, 13, 5)):
        (made,) = whole.propose(workload(), found, HARDWARE, Budget(budget_for(room)))
        assert (made.micro_batch, made.micro_batches) == (size, parts)
    assert not made.holds_gradients and made.line("network") == "network:exact"
    cost = made.estimate(workload(), found, HARDWARE)
    assert cost.storage_bytes == cost.phases[0].storage_bytes == 3 * 64
    (unlimited,) = whole.propose(workload(), found, HARDWARE, Budget())
    assert (unlimited.micro_batch, unlimited.line("network")) == (64, "network")


def test_a_process_that_was_started_for_the_run_predicts_with_less_safety(monkeypatch):
    others = with_safety(10 * MB, 90 * MB)
    monkeypatch.setattr("snugfit.strategies.memory_estimates.is_own_process", lambda: True)
    own = with_safety(10 * MB, 90 * MB)
    assert own == int(100 * MB * (1 + OWN_SAFETY.share)) + OWN_SAFETY.bytes < others
    assert step_headroom(Budget(others + RESERVED_BYTES), 10 * MB) == pytest.approx(90 * MB, abs=1), "as before"


def test_only_a_process_for_which_another_one_waits_is_the_runs_own():
    code = "from snugfit.memory.process import *; prepare_process(1{}); print(is_own_process())"
    for waiting, own in (("", "False"), (", waiting=1", "True")):
        done = subprocess.run([sys.executable, "-c", code.format(waiting)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == own
