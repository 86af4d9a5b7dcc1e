"""``snugfit.fit`` on a device: the steps of a plain loop, within prediction and budget."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from snugfit.errors import InfeasibleBudgetError
from snugfit.memory.device import device_at_rest

MB = 10**6
SETTINGS = {"lr": 0.05, "weight_decay": 1e-3}


def network(device):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 5)).to(device)


def batch(device, images=32):
    torch.manual_seed(1)
    return torch.randn(images, 3, 32, 32, device=device), torch.randint(5, (images,), device=device)


def budget(device, above):
    """A budget of ``above`` MB besides the context."""
    found = device_at_rest(device)
    return (0 if found is None else found.context_bytes) + above * MB


def test_a_loop_takes_the_steps_of_a_plain_one_within_its_prediction(device):
    model, data = network(device), batch(device)
    other = copy.deepcopy(model)
    memory = budget(device, 200)
    with snugfit.fit(model, F.cross_entropy, memory=memory, batch_size=32, example=data, **SETTINGS) as step:
        losses = [float(step(*data)) for _ in range(4)]
    record, optimizer = step.record, torch.optim.SGD(other.parameters(), momentum=0.9, **SETTINGS)
    for expected in losses:
        optimizer.zero_grad()
        loss = F.cross_entropy(other(data[0]), data[1])
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected, rel=1e-4)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)
    if device_at_rest(device) is not None:  # on the processor, other tests leave memory free in this process
        assert record.measured_bytes <= record.predicted_bytes <= memory


def test_a_tight_budget_divides_the_batch_and_a_smaller_one_names_what_would_do(device):
    model, data = network(device), batch(device, 256)
    too_small = snugfit.fit(model, F.cross_entropy, memory=budget(device, 1), batch_size=256, example=data)
    with pytest.raises(InfeasibleBudgetError, match="Smallest budget") as refused, too_small:
        pass
    smallest = refused.value.smallest_bytes
    with snugfit.fit(model, F.cross_entropy, memory=smallest, batch_size=256, example=data) as step:
        before = float(step(*data))
        assert step.plan.micro_batches > 1
        assert float(step(*data)) < before
    assert all(parameter.grad is None for parameter in model.parameters())
