"""Estimates are compared with bytes counted by hand, with real steps of plain PyTorch, and with committed runs."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from snugfit import _models as models
from snugfit._upstream import to_channels_last
from snugfit.memory import tensor_peak_bytes

SCALAR = 4
"""The loss times its share of the step, which the plain loop does not have."""
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


class Shared(nn.Module):
    """Two convolutions with one weight, a branch, and a tensor that the forward pass makes."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.other, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)
        self.other.weight, self.norm = self.again.weight, nn.BatchNorm2d(16)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = x + self.norm(self.other(F.relu(self.again(x))))
        return self.last((x * torch.ones(1)).mean((2, 3)))


def plain_step(module, shape, batch, make_optimizer, bfloat16=False):
    """Peak tensor bytes of the second of two real steps, in the usual loop."""
    to_channels_last(module.train())
    optimizer = make_optimizer(module.parameters())

    def step():
        images = torch.randn(batch, *shape).contiguous(memory_format=torch.channels_last)
        labels = torch.zeros(batch, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            outputs = module(images)
            loss = F.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [each for values in optimizer.state.values() for each in values.values() if torch.is_tensor(each)]
    return tensor_peak_bytes(step, [module, *state])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def tiny():
    return nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def test_bytes_of_a_tiny_network_as_counted_by_hand():
    step = snugfit.estimate(tiny(), (1, 4, 4), batch_size=5).steps[0]
    weights = 4 * (2 * 9 + 8 * 3 + 3)
    images, labels, feature_map, logits = 4 * 5 * 16, 8 * 5, 4 * 5 * 2 * 2 * 2, 4 * 5 * 3
    assert step.whole["parameters"] == step.whole["gradients"] == step.whole["optimizer_state"] == weights
    assert step.whole["batch"] == images + labels
    # the linear layer reads ReLU's kept output through a view; the loss keeps log-probabilities and a sum of weights
    assert step.whole["activations"] == feature_map + logits + 4
    assert step.whole["buffers"] == 0


def test_what_is_there_at_the_peak_sums_to_the_peak():
    found = snugfit.estimate("smallconv", (1, 16, 16), batch_size=(4, 32))
    for step in found.steps:
        assert sum(step.at_peak.values()) == step.peak_bytes
        assert all(step.at_peak[kind] <= step.whole[kind] for kind in step.at_peak)


@pytest.mark.parametrize("name, make", [("sgd", sgd), ("adamw", adamw)])
def test_the_peak_is_that_of_a_real_step_of_resnet20(name, make):
    found = snugfit.estimate("resnet20", (3, 32, 32), batch_size=8, optimizer=name)
    assert found.divided
    real = plain_step(models.build("resnet20", 10, 32), (3, 32, 32), 8, make)
    assert found.peak_bytes == real + SCALAR


def test_the_peak_is_that_of_a_real_step_with_shared_weights():
    found = snugfit.estimate(Shared(), (3, 12, 12), batch_size=6)
    assert not found.divided and "tied weights" in found.notes[-1]
    assert found.peak_bytes == plain_step(Shared(), (3, 12, 12), 6, sgd) + SCALAR
