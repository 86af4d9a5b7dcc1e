"""Lean operators on maps whose elements share memory, such as one channel expanded to many: gradients are torch's."""

import copy

import pytest
import torch
from torch import nn

from snugfit.lean import average_pool, use_lean

VIEWS = {
    "channels": ((4, 1, 8, 8), lambda x: x.expand(4, 6, 8, 8)),
    "samples": ((1, 6, 8, 8), lambda x: x.expand(4, 6, 8, 8)),
    "columns": ((4, 6, 8, 1), lambda x: x.expand(4, 6, 8, 8)),
    "one value": ((1, 1, 1, 1), lambda x: x.expand(4, 6, 8, 8)),
    "overlapping windows": ((4, 6, 15), lambda x: x.unfold(2, 8, 1)),
    "every other channel": ((4, 12, 8, 8), lambda x: x[:, ::2]),
    "turned": ((8, 4, 8, 6), lambda x: x.permute(1, 3, 0, 2)),
    "a single map": ((1, 8, 8), lambda x: x.expand(6, 8, 8)),
}
MODULES = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 2, 1),
    nn.AvgPool2d(2),
    nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveAvgPool2d(3),
    nn.LeakyReLU(0.1),
    nn.Conv2d(6, 4, 3, padding=1),
    nn.BatchNorm2d(6).eval(),
]


def gradients(run, view, source, parameters=()):
    inputs = source.clone().requires_grad_()
    outputs = run(view(inputs))
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view(outputs.shape)
    return [outputs, *torch.autograd.grad(outputs, [inputs, *parameters], weights)]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("module", MODULES, ids=str)
def test_gradients_are_torchs(module, view):
    if view == "a single map" and isinstance(module, nn.BatchNorm2d):
        pytest.skip("BatchNorm2d takes batches alone")
    shape, make = VIEWS[view]
    stock, lean = copy.deepcopy(module).double(), nn.Sequential(copy.deepcopy(module).double())
    use_lean(lean)
    assert type(lean[0]) is not type(stock)
    source = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = gradients(stock, make, source, list(stock.parameters()))
    found = gradients(lean, make, source, list(lean.parameters()))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("view", ["channels", "samples", "one value", "overlapping windows"])
def test_the_average_pool_of_local_losses(view):
    shape, make = VIEWS[view]
    source = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = gradients(nn.AdaptiveAvgPool2d(4), make, source)
    torch.testing.assert_close(gradients(lambda maps: average_pool(maps, 4), make, source), expected)
