"""Saved tensors on disk against saved tensors in memory."""

import copy
import gc

import pytest
import torch
from small_networks import NETWORKS, SHAPE
from strategy_samples import workload
from torch import nn

from snugfit._chain import Chain
from snugfit._training.network import NetworkTrainer
from snugfit.memory.host_pages import HostPages
from snugfit.memory.paging import PageFile
from snugfit.strategies.recomputation import paging
from snugfit.strategies.recomputation.paging import DiskPages, recomputing_forward
from snugfit.strategies.recomputation.schedule import Schedule

KINDS = ("vgg", "residual", "mobilenet")


@pytest.fixture(autouse=True)
def _page_small_tensors(monkeypatch):
    monkeypatch.setattr(paging, "SMALLEST_BYTES", 64)


def trained(network, schedule, pages=None, *, micro_batches=1, steps=3, dtype=torch.float64, precision="float32"):
    """Losses and state after a few steps."""
    chain = Chain.from_module(copy.deepcopy(network), SHAPE)
    module = chain.to_module().to(dtype)
    forward = recomputing_forward([unit.module for unit in chain.all_units], schedule, pages)
    trainer = NetworkTrainer(module, forward, workload(precision=precision), micro_batches)
    generator, losses = torch.Generator().manual_seed(1), []
    torch.manual_seed(5)
    for step in range(steps * micro_batches):
        images = torch.randn(4, *SHAPE, generator=generator, dtype=dtype).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(10, (4,), generator=generator)
        update = step % micro_batches == micro_batches - 1
        losses.append(trainer.step(images, labels, 1 / micro_batches, update).loss)
    return losses, module.state_dict()


def assert_equal_to_the_bit(got, want):
    assert got[0] == want[0]
    for name, value in want[1].items():
        assert torch.equal(got[1][name], value), name


def small_network(kind):
    torch.manual_seed(0)
    network = NETWORKS[kind]()
    return network, len(Chain.from_module(copy.deepcopy(network), SHAPE).all_units) - 1


SCHEDULES = [
    *((kind, "[0-{last}]") for kind in KINDS),
    ("vgg", "[0-1] 2-{last}"),
    ("residual", "[0 (1)] 2-{last}"),
    ("mobilenet", "[(0) (1)] (2) 3-{last}"),
]


@pytest.mark.parametrize(("kind", "schedule"), SCHEDULES)
def test_paging_to_disk_changes_no_bit(kind, schedule, tmp_path):
    """Against autograd in float64 with everything in memory, over steps in which weights change."""
    network, last = small_network(kind)
    file = PageFile(tmp_path)
    want = trained(network, Schedule.keeping(last + 1))
    assert_equal_to_the_bit(trained(network, Schedule.parse(schedule.format(last=last)), DiskPages(file)), want)
    assert file.bytes > 100_000
    gc.collect()
    assert all(page() is None for page in file._pages), "every page was given back"


@pytest.mark.parametrize(("kind", "schedule"), SCHEDULES)
def test_paging_to_host_memory_changes_no_bit(kind, schedule):
    """The same with copies of tensors on the processor, which a GPU's are, too."""
    network, last = small_network(kind)
    pages = HostPages()
    want = trained(network, Schedule.keeping(last + 1))
    assert_equal_to_the_bit(trained(network, Schedule.parse(schedule.format(last=last)), pages), want)
    gc.collect()
    assert pages._pages and all(page() is None for page in pages._pages), "every page was given back"


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"dtype": torch.float32, "precision": "bfloat16"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_and_low_precision_change_no_bit(kind, options, tmp_path):
    network, last = small_network(kind)
    want = trained(network, Schedule.keeping(last + 1), **options)
    got = trained(network, Schedule.parse(f"[0-{last - 1}] {last}"), DiskPages(PageFile(tmp_path)), **options)
    assert_equal_to_the_bit(got, want)


def test_a_tensor_that_two_layers_save_is_written_once(tmp_path):
    """ReLU keeps its result, and the next convolution its input, which is the same tensor."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    pager = paging.Pager(DiskPages(PageFile(tmp_path)), [network])
    images = torch.randn(2, *SHAPE)
    with pager.paging(images):
        outputs = network(images)
    assert pager.bytes == outputs.nbytes == pager.pages.file.bytes
    outputs.sum().backward()


def test_what_only_shares_an_address_is_written_again(tmp_path):
    """Memory that was freed is used again within a forward pass."""
    pager = paging.Pager(DiskPages(PageFile(tmp_path)), [])
    scale = torch.ones(5000, requires_grad=True)
    with pager.paging(scale):
        outputs = scale
        for _ in range(10):
            outputs = (outputs * 1.5).exp().log()
    outputs.sum().backward()
    torch.testing.assert_close(scale.grad, torch.full((5000,), 1.5**10))


def test_a_schedule_that_pages_prints_and_parses():
    for text in ("[0-3]", "[0-1 (2-3)] 4-6", "[(0-1)] ((2) 3) 4", "[(0-1) 2] 3"):
        assert str(Schedule.parse(text)) == text
    assert Schedule.parse("[0-1 (2-3)] 4-6").paged == 3
