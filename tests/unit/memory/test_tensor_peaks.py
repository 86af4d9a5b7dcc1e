"""Live and saved tensor bytes against counts made by hand."""

import gc
import weakref

import pytest
import torch
from torch import nn

from snugfit.memory.tensors import saved_bytes, tensor_peak_bytes

devices = pytest.mark.parametrize("device", ["cpu", "meta"])
KB = 1000


def kilobytes(count, device):
    return torch.empty(count * KB // 4, device=device)


@devices
def test_overlapping_lives_add_up(device):
    def step():
        first = kilobytes(40, device).fill_(1)
        second = first + 1
        del first
        third = second.repeat(2)
        del second
        return third[:10].sum()

    assert tensor_peak_bytes(step) == (40 + 80) * KB


@devices
def test_views_and_in_place_operators_take_nothing(device):
    def step():
        tensor = kilobytes(40, device).zero_()
        tensor.view(10, -1).t().add_(1).relu_()
        tensor[:100].mul_(2)

    assert tensor_peak_bytes(step) == 40 * KB


@devices
def test_what_lived_before_counts_only_when_tracked(device):
    before = kilobytes(100, device).zero_()
    assert tensor_peak_bytes(lambda: before + 1) == 100 * KB
    assert tensor_peak_bytes(lambda: before + 1, [before]) == 200 * KB
    assert tensor_peak_bytes(lambda: before.add_(1), [before, before.view(2, -1)]) == 100 * KB


@devices
def test_a_linear_step_by_hand(device):
    """Weight 4 kB, input 2 kB, output 20 kB and the sum of it; the weight's gradient comes when the output is gone."""
    layer = nn.Linear(10, 100, bias=False, device=device)
    inputs = torch.empty(50, 10, device=device)

    def step():
        layer(inputs).sum().backward()
        layer.weight.grad = None

    assert tensor_peak_bytes(step, [layer, inputs]) == 4 * KB + 2 * KB + 20 * KB + 4


def step_with_momentum(device):
    layer = nn.Linear(100, 100, bias=False, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.ones(2, 100, device=device)

    def step():
        layer(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, [layer, inputs]


@devices
def test_the_second_step_has_optimizer_state(device):
    """Weight, gradient and momentum are 40 kB each, the input 800 bytes.

    In the second step the momentum is there in the backward pass too, beside the sum and its gradient.
    """
    assert tensor_peak_bytes(*step_with_momentum(device)) == 3 * 40 * KB + 800
    assert tensor_peak_bytes(*step_with_momentum(device), repeats=2) == 3 * 40 * KB + 800 + 2 * 4


def training_step(device):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 64, 10),
    ).to(device)  # fmt: skip
    inputs, labels = torch.ones(4, 3, 16, 16, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step():
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, [network, inputs, labels]


def test_a_whole_step_takes_the_same_on_both_devices():
    peaks = {device: tensor_peak_bytes(*training_step(device), repeats=2) for device in ("cpu", "meta")}
    assert peaks["cpu"] == peaks["meta"]
    saved = 4 * 4 * (3 * 256 + 8 * 256 + 8 * 256 + 8 * 64)
    assert peaks["cpu"] > saved


def test_nothing_is_kept_alive():
    step, tracked = training_step("cpu")
    network = tracked[0]
    tensor_peak_bytes(step, tracked, repeats=2)
    references = [weakref.ref(parameter) for parameter in network.parameters()]
    references.append(weakref.ref(tracked[1].untyped_storage()))
    del step, tracked, network
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_an_error_in_the_step_passes_through_and_ends_the_counting():
    with pytest.raises(ZeroDivisionError):
        tensor_peak_bytes(lambda: 1 / 0)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def held(module):
    return [*module.parameters(), *module.buffers()]


@devices
def test_saved_bytes_of_conv_norm_relu_by_hand(device):
    """The conv keeps its input, the norm its input and two statistics per channel, the ReLU its output."""
    module = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()).to(device)
    inputs = torch.ones(2, 3, 8, 8, device=device)
    given, made = 2 * 3 * 64 * 4, 2 * 5 * 64 * 4
    assert saved_bytes(lambda: module(inputs), held(module)) == given + made + 2 * 5 * 4 + made


@devices
def test_saved_bytes_of_an_in_place_relu_count_once(device):
    """The norm keeps its own input; the ReLU works on the norm's output and keeps that."""
    module = nn.Sequential(nn.Conv2d(3, 5, 1, bias=False), nn.ReLU(inplace=True), nn.Conv2d(5, 2, 1)).to(device)
    inputs = torch.ones(2, 3, 8, 8, device=device)
    assert saved_bytes(lambda: module(inputs), held(module)) == 2 * 64 * 4 * (3 + 5)


@devices
def test_weights_count_unless_they_are_held(device):
    layer = nn.Linear(10, 20, bias=False, device=device)
    inputs = torch.ones(4, 10, device=device, requires_grad=True)
    assert saved_bytes(lambda: layer(inputs)) == 4 * 10 * 4 + 20 * 10 * 4
    assert saved_bytes(lambda: layer(inputs), held(layer)) == 4 * 10 * 4
    assert saved_bytes(lambda: layer(inputs), [*held(layer), inputs]) == 0


def test_nothing_is_saved_without_gradients():
    layer = nn.Linear(10, 20)
    with torch.no_grad():
        assert saved_bytes(lambda: layer(torch.ones(4, 10))) == 0
