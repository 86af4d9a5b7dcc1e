"""What the learning signal costs: counts by hand and by slow loops, units of several layers, new local losses."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain
from snugfit.local import LOCAL_LOSSES, LocalLoss, NetworkStats, UnitShape, build_local_loss, learning_signal
from snugfit.local.base import Objective
from snugfit.local.macs import SAMPLES, input_gradient_macs, loss_macs

PROJECTIONS = ("linear", "lls", "lls-m", "lls-mxm")


def tiny():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


def tiny_chain():
    return Chain.from_module(tiny(), (2, 8, 8), "tiny")


def slow_input_gradient(gradient, weight, input_size, stride, padding):
    """A convolution's input gradient by loops, and how many products they make, those with padding among them."""
    padded = torch.zeros(weight.shape[1], *(size + 2 * padding for size in input_size), dtype=gradient.dtype)
    ranges = (*gradient.shape, *weight.shape[1:])
    products = 0
    for k, y, x, c, i, j in itertools.product(*map(range, ranges)):
        padded[c, y * stride + i, x * stride + j] += gradient[k, y, x] * weight[k, c, i, j]
        products += 1
    return padded[:, padding:-padding, padding:-padding], products


def slow_product(matrix, vector):
    result, products = torch.zeros(len(matrix), dtype=vector.dtype), 0
    for row, column in itertools.product(*map(range, matrix.shape)):
        result[row] += matrix[row, column] * vector[column]
        products += 1
    return result, products


def test_backpropagation_takes_the_products_of_slow_loops():
    network = tiny().double().eval()
    maps = torch.rand(1, 3, 4, 4, dtype=torch.float64)
    second, linear = network[3], network[7]
    hidden = second(maps.requires_grad_())
    to_hidden, of_linear = slow_product(linear.weight.T.detach(), torch.arange(5, dtype=torch.float64))
    through_second, of_second = slow_input_gradient(to_hidden.view(4, 2, 2), second.weight.detach(), (4, 4), 2, 1)
    logits = linear(hidden.flatten(1))
    expected = torch.autograd.grad(logits, maps, torch.arange(5, dtype=torch.float64)[None])[0][0]
    torch.testing.assert_close(through_second, expected)
    assert learning_signal(tiny_chain(), 5, ())["backprop"] == (of_linear + of_second, 0)


def test_projections_by_hand():
    """Maps of 3 x 8 x 8 and 4 x 2 x 2 values, both pooled to 2 x 2."""
    signals = learning_signal(tiny_chain(), 5, PROJECTIONS)
    elements, latents = 3 * 64 + 4 * 4, 3 * 4 + 4 * 4
    assert signals["lls"] == (4 * elements + 2 * 5 * latents, 0)
    assert signals["linear"] == (4 * elements + 3 * 5 * latents, 5 * latents)
    assert signals["lls-m"] == (signals["lls"].macs + 3 * 5 * 2, 5 * 2)
    assert signals["lls-mxm"] == (signals["lls"].macs + 3 * 25 * 2, 25 * 2)


def test_auxiliary_networks_by_hand():
    """The first unit's is computed and differentiated twice; the last unit learns through the head, a 16 x 5 layer."""
    signal = learning_signal(tiny_chain(), 5, ["classic"])["classic"]
    conv, linear = 3 * 256 * 9, 4 * 256 * 5
    assert signal.macs == 4 * 3 * 64 + 3 * (conv * 16 + linear) + 16 * 5
    assert signal.additional_parameters == conv + 2 * 256 + linear + 5


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, stride, 1), nn.Conv2d(out, out, 3, 1, 1)
        self.shortcut = nn.Conv2d(channels, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_residual_unit_counts_its_second_convolution(stride):
    block, pixels = Block(4, 4, stride), (8 // stride) ** 2
    second = 4 * 4 * 9 * pixels
    assert input_gradient_macs(block, (4, 8, 8)) == second
    shortcut = 4 * 4 * pixels if stride > 1 else 0
    assert input_gradient_macs(block, (4, 8, 8), reach_input=True) == 2 * second + shortcut
    units = [("stem", nn.Conv2d(3, 4, 3, padding=1)), ("block", block)]
    head = ("head", nn.Sequential(nn.Flatten(), nn.Linear(4 * pixels, 5)))
    signals = learning_signal(Chain.from_units(units, head, (3, 8, 8)), 5, ["lls"])
    elements, latents = 4 * 64 + 4 * pixels, 4 * 4 + 4 * 4
    assert signals["lls"].macs == 4 * elements + 2 * 5 * latents + second
    assert signals["backprop"].macs == 2 * second + shortcut + 4 * pixels * 5


class Grouped(LocalLoss):
    """A convolution of two groups, its channels' means as logits."""

    def __init__(self, unit, network):
        super().__init__()
        self.conv = nn.Conv2d(unit.output_shape[0], 2 * network.classes, 3, groups=2, padding=1)

    def predict(self, features):
        return self.conv(features).mean((2, 3)).unflatten(1, (-1, 2)).sum(2)


def test_a_newly_registered_loss_gets_a_row(monkeypatch):
    monkeypatch.setitem(LOCAL_LOSSES, "grouped", Grouped)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)
    )
    signals = learning_signal(Chain.from_module(network, (3, 8, 8)), 5)
    assert list(signals) == ["backprop", *LOCAL_LOSSES]
    conv = 2 * 10 * 9
    assert signals["grouped"] == (4 * 4 * 36 + 3 * conv * 36 + 96 * 5, conv + 10)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_both_gradients_of_a_convolution_take_its_forward_macs(kind, groups):
    class Loss(Grouped):
        def __init__(self):
            LocalLoss.__init__(self)
            self.conv = kind(4, 6, 3, stride=2, padding=1, groups=groups)

    pixels = 16 if kind is nn.Conv2d else 64
    assert loss_macs(Objective(Loss(), (SAMPLES, 4, 8, 8)), (4, 8, 8)) == 3 * 4 * 6 * 9 * pixels // groups


def test_what_is_counted_is_left_as_it_was():
    chain = tiny_chain()
    frozen = next(chain.units[0].module.parameters()).requires_grad_(False)
    chain.units[1].module.eval()
    before = {name: tensor.clone() for unit in chain.all_units for name, tensor in unit.module.state_dict().items()}
    signals = learning_signal(chain, 5)
    assert all(
        p.grad is None and p.requires_grad == (p is not frozen) for u in chain.all_units for p in u.module.parameters()
    )
    assert [unit.module.training for unit in chain.all_units] == [True, False, True]
    for unit in chain.all_units:
        for name, tensor in unit.module.state_dict().items():
            assert torch.equal(tensor, before[name]), name
    assert signals == learning_signal(tiny_chain(), 5)


@pytest.mark.parametrize("name", sorted(LOCAL_LOSSES))
def test_a_loss_counts_alike_on_any_device(name):
    unit, network = UnitShape((6, 4, 4)), NetworkStats(8, 16, 4)
    with torch.device("meta"):
        expected = build_local_loss(name, unit, network).signal_macs(unit)
    assert build_local_loss(name, unit, network).signal_macs(unit) == expected > 0
