"""Feature maps that leave a GPU for host memory, and come back."""

import copy
import gc
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import snugfit
from snugfit._chain import Chain
from snugfit.memory.device import device_at_rest
from snugfit.memory.host_pages import HostPages, keeps_pages_on_host, multiplications_per_byte
from snugfit.memory.tensors import LiveBytes
from snugfit.profiling import unit_stats
from snugfit.strategies.recomputation import paging
from snugfit.strategies.recomputation.dynamic_program import paged_bytes
from snugfit.strategies.recomputation.paging import Paging, recomputing_forward
from snugfit.strategies.recomputation.schedule import Schedule
from snugfit.strategies.recomputation.unit_costs import unit_costs

MB = 10**6
COUNTS = [1, 1000, 5_000_000, 77, 2_000_000]
ORDERS = {"backward": reversed, "forward": list, "mixed": lambda places: random.Random(1).sample(places, len(places))}


@pytest.mark.parametrize("order", ORDERS)
def test_pages_come_back_as_they_were_in_any_order(order, device):
    pages, generator = HostPages(), torch.Generator().manual_seed(0)
    for _ in range(3):
        values = [torch.randint(256, (count,), generator=generator, dtype=torch.uint8) for count in COUNTS]
        written = [pages.write(each.to(device)) for each in values]
        pages.finish()
        for at in ORDERS[order](list(range(len(COUNTS)))):
            found = pages.read(written[at])
            assert found.device == device and torch.equal(found.cpu(), values[at])
            written[at] = None
    gc.collect()
    assert pages._transfer is None and all(page() is None for page in pages._pages)


def test_two_tensors_at_once_are_in_the_memory_of_the_device():
    """One that is written or read, and one before or after it; counted on the meta device."""
    pages, written = HostPages(), []
    with LiveBytes() as counter:
        for _ in range(6):
            written.append(pages.write(torch.empty(1000, device="meta")))
        assert counter.peak == 2 * 4000 and counter.live == 4000
        pages.finish()
        assert counter.live == 0
        while written:
            pages.read(written.pop())
        gc.collect()
        assert counter.peak == 2 * 4000 and counter.live == 0


def test_what_is_dropped_unread_does_not_disturb_later_pages(device):
    pages = HostPages()
    for step in range(4):
        written = [pages.write(torch.full((100_000,), step, device=device)) for _ in range(5)]
        pages.finish()
        assert (pages.read(written.pop()) == step).all()
        del written
        gc.collect()


def network():
    torch.manual_seed(0)
    layers = []
    for wide in (3, 16, 16, 16, 16):
        layers += [nn.Conv2d(wide, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def step(module, schedule, pages, device):
    """Gradients of a step, and the most bytes of the device that tensors took in the second one."""
    chain = Chain.from_module(copy.deepcopy(module).to(device), (3, 64, 64))
    forward = recomputing_forward([unit.module for unit in chain.all_units], schedule, pages)
    torch.manual_seed(1)
    images = torch.randn(32, 3, 64, 64).to(device)
    for _ in range(2):
        chain.to_module().zero_grad()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        forward(images).square().mean().backward()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return [parameter.grad for unit in chain.all_units for parameter in unit.module.parameters()], peak


def test_a_step_computes_the_same_in_less_memory(device, monkeypatch):
    monkeypatch.setattr(paging, "SMALLEST_BYTES", 64)
    module = network()
    last = len(Chain.from_module(copy.deepcopy(module), (3, 64, 64)).all_units) - 1
    plain, most = step(module, Schedule.keeping(last + 1), None, device)
    paged, less = step(module, Schedule.parse(f"[0-{last}]"), HostPages(), device)
    for mine, theirs in zip(paged, plain, strict=True):
        assert torch.equal(mine, theirs)
    if device.type == "cuda":
        assert less < 0.7 * most


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["gpu"], indirect=True)
def test_copies_are_slower_than_arithmetic(device):
    found = multiplications_per_byte(device)
    assert math.log2(found).is_integer() and 1 < found < 1e6


def test_what_was_just_written_is_copied_back(device):
    values = torch.arange(1000, device=device)
    pages = HostPages()
    found = pages.read(pages.write(values))
    assert torch.equal(found, values) and found.data_ptr() != values.data_ptr()


def test_a_change_while_values_are_copied_is_an_error(device):
    values = torch.zeros(1000, device=device)
    pages = HostPages()
    pages.write(values.detach())
    values += 1
    with pytest.raises(RuntimeError, match="changed in place while it was copied"):
        pages.finish()
    pages.write(values)  # it goes on
    pages.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["gpu"], indirect=True)
def test_a_run_that_pages_stays_within_its_prediction(device, tmp_path):
    """The schedule that pages everything, whatever else would be faster here."""
    assert keeps_pages_on_host(device)
    small = {"image_size": 64, "max_train": 256, "max_val": 32, "batch_size": 64, "epochs": 1, "seed": 3}
    budget = device_at_rest(device).context_bytes + 2000 * MB
    options = {**small, "device": str(device), "strategy": "checkpoint", "activations": "paged"}
    planned = snugfit.plan("vgg16", "digits", memory=budget, **options)
    chain, choice = planned.assembly.chain, planned.plan.choice
    last = len(chain.all_units) - 1
    schedule = Schedule.parse(f"[0-{last}]")
    moved = paged_bytes(schedule, unit_costs(chain, unit_stats(chain), 64, paging=Paging(1e9, HostPages))) // 64
    settings = {**choice.settings, "recomputation": str(schedule), "paged_bytes": moved}
    forced = replace(choice, settings=settings)
    record = replace(planned, plan=replace(planned.plan, candidates=(forced,), chosen=0)).run((), out=tmp_path / "run")
    plain = planned.run((), out=tmp_path / "plain")
    assert record.measured["peak_bytes"] <= record.budget["memory_bytes"]
    held = record.measured["device_memory"]["host_bytes"] - plain.measured["device_memory"]["host_bytes"]
    assert 0 < held <= 2 * moved * settings["micro_batch"]
