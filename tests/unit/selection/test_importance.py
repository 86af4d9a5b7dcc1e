"""Importance against autograd and torch's own optimizers on a copy, in float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._core.workload import OptimizerSettings
from snugfit._training.optimizers import ParameterOptimizers
from snugfit.memory.scratch import ScratchFile, StoredTensor
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.selection.importance import importance, scratch_bytes
from snugfit.strategies.elastic.probes import trial_updates

SETTINGS = {
    "sgd": OptimizerSettings("sgd", lr=0.05, weight_decay=0.01),
    "plain sgd": OptimizerSettings("sgd", lr=0.05, momentum=0.0, weight_decay=0.0),
    "adamw": OptimizerSettings("adamw", lr=0.01, weight_decay=0.1),
}
BATCH = 6


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


def network():
    """Units in evaluation mode, named as in one model, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        Branch(),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.Tanh()),
        nn.Linear(8, 5),
    ).double()
    for norm in (layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)):
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.uniform_(norm.weight, 0.5, 2)
    return model.eval()


class Named(nn.Module):
    """A unit whose parameters bear the whole model's names."""

    def __init__(self, index, unit):
        super().__init__()
        self.add_module(str(index), unit)

    def forward(self, x):
        return next(self.children())(x)


def units_of(model):
    return [Named(index, unit) for index, unit in enumerate(model)]


SHAPES = [(3, 6, 6), (4, 6, 6), (4, 6, 6), (8,)]


def samples():
    torch.manual_seed(1)
    return torch.randn(BATCH, 3, 6, 6, dtype=torch.float64), torch.randint(0, 5, (BATCH,))


def optimizer_of(settings, parameters):
    if settings.name == "adamw":
        return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def warmed(settings, model):
    """State of the optimizer after two steps on other samples, by flat names; weights moved by them."""
    optimizers = ParameterOptimizers(model.named_parameters(), settings)
    torch.manual_seed(2)
    for _ in range(2):
        F.cross_entropy(model(torch.randn(4, 3, 6, 6, dtype=torch.float64)), torch.arange(4)).backward()
        optimizers.step()
    return {name: tensor.clone() for name, tensor in optimizers.state().items()}


def stored(state):
    """The state as it lies in a scratch file: read anew each time."""
    return {name: SimpleNamespace(read=tensor.clone) for name, tensor in state.items()}


def oracle(settings, model, state, images, labels):
    """Equations 2 and 5 word by word."""
    model = copy.deepcopy(model)
    named = dict(model.named_parameters())
    optimizer = optimizer_of(settings, list(named.values()))
    for name, parameter in named.items():
        own = {key.rpartition("/")[2]: t.clone() for key, t in state.items() if key.rpartition("/")[0] == name}
        if own:
            optimizer.state[parameter] = own
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    gradients = torch.autograd.grad(loss, list(named.values()))
    return {
        name: -float((gradient * (parameter.detach() - before[name])).sum())
        for (name, parameter), gradient in zip(named.items(), gradients, strict=True)
    }


def run(metric, model, tmp_path, *, chunk=BATCH, update=None, images=None):
    units = units_of(model)
    own, labels = samples()
    size = sum(2 * 8 * BATCH * torch.Size(shape).numel() + 128 for shape in SHAPES)
    size += sum(p.numel() * 8 + 64 for p in model.parameters())
    with ScratchFile(tmp_path / "scratch", size) as scratch:
        return importance(
            metric, units, own if images is None else images, labels, chunk=chunk, scratch=scratch, update=update
        )


@pytest.mark.parametrize("chunk", [1, 2, 4, BATCH, 50])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_the_papers_whatever_the_chunk(name, chunk, tmp_path):
    model, settings = network(), SETTINGS[name]
    state = warmed(settings, model)
    want = oracle(settings, model, state, *samples())
    found = run("contribution", model, tmp_path, chunk=chunk, update=trial_updates(settings, 1.0, stored(state)))
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert found[key] == pytest.approx(value, rel=1e-10), key
    assert len({round(value, 14) for value in want.values()}) == len(want), "tensors differ, so a mix-up would show"


def test_an_update_is_taken_back_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr("snugfit.selection.importance.PART_VALUES", 30)
    model, settings = network(), SETTINGS["adamw"]
    before = copy.deepcopy(model.state_dict())
    want = oracle(settings, model, {}, *samples())
    found = run("contribution", model, tmp_path, update=trial_updates(settings))
    assert found == pytest.approx(want, rel=1e-10)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_are_restored_if_the_file_fails_while_an_update_is_taken_back(tmp_path, monkeypatch):
    monkeypatch.setattr("snugfit.selection.importance.PART_VALUES", 30)
    model, settings = network(), SETTINGS["sgd"]
    before = copy.deepcopy(model.state_dict())
    read, failures = StoredTensor.read, [OSError("disk")]

    def failing(stored, rows=slice(None)):
        if rows.start and failures and stored.shape[1:] == (4, 3, 3):  # the second part of a weight
            raise failures.pop()
        return read(stored, rows)

    monkeypatch.setattr(StoredTensor, "read", failing)
    with pytest.raises(OSError, match="disk"):
        run("contribution", model, tmp_path, update=trial_updates(settings))
    assert not failures
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_pass_takes_a_gradient_and_its_new_state_beside_the_weights(tmp_path):
    unit = Named(0, nn.Sequential(nn.Conv2d(256, 512, 3), nn.Flatten())).eval()  # 4.7 MB
    unit.to(memory_format=torch.channels_last)
    weight = sum(parameter.nbytes for parameter in unit.parameters())
    images = torch.randn(2, 256, 3, 3).contiguous(memory_format=torch.channels_last)
    settings = OptimizerSettings("sgd", lr=0.05, momentum=0.9)
    with ScratchFile(tmp_path / "scratch", weight + 1024) as scratch:

        def once():
            options = {"chunk": 2, "scratch": scratch, "update": trial_updates(settings)}
            importance("contribution", [unit], images, torch.tensor([0, 1]), **options)

        peak = tensor_peak_bytes(once, [unit, images])
    assert 3 * weight <= peak < 3.5 * weight, "weight, gradient, and momentum"


def test_the_optimizers_state_and_the_weights_stay_bit_for_bit(tmp_path):
    model, settings = network(), SETTINGS["sgd"]
    state = warmed(settings, model)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    before = copy.deepcopy(model.state_dict())
    run("contribution", model, tmp_path, chunk=2, update=trial_updates(settings, 1.0, stored(state)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len(state) == len(kept) > 0
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("fails_at", [0, 1, 5, None])
def test_everything_is_put_back_where_an_update_fails(fails_at, tmp_path):
    """``fails_at``: how many updates pass before; None: the second walk fails, all weights being updated."""
    model = network()
    frozen = {"0.0.weight", "3.bias"}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    before, calls, changed = copy.deepcopy(model.state_dict()), [], trial_updates(SETTINGS["sgd"])

    def update(name, parameter):
        if len(calls) == fails_at:
            raise ValueError("no more")
        calls.append(name)
        changed(name, parameter)

    if fails_at is None:
        count = len(list(model.parameters()))
        model[0].register_forward_hook(lambda *_: 1 / 0 if len(calls) == count else None)
    with pytest.raises((ValueError, ZeroDivisionError)):
        run("contribution", model, tmp_path, update=update)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert parameter.requires_grad == (name not in frozen)
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("metric", ["contribution", "gradient", "weight"])
def test_frozen_tensors_are_told_too_and_stay_frozen(metric, tmp_path):
    model, settings = network(), SETTINGS["plain sgd"]
    want = run(metric, model, tmp_path, update=trial_updates(settings))
    model.requires_grad_(False)
    model[3].bias.requires_grad_(True)
    assert run(metric, model, tmp_path, update=trial_updates(settings)) == want
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["3.bias"]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("chunk", [1, 4, BATCH])
def test_gradient_magnitude(chunk, tmp_path):
    model = network()
    images, labels = samples()
    F.cross_entropy(model(images), labels).backward()
    want = {name: float(p.grad.abs().sum()) for name, p in model.named_parameters()}
    model.zero_grad()
    assert run("gradient", model, tmp_path, chunk=chunk) == pytest.approx(want, rel=1e-10)


def test_weight_magnitude(tmp_path):
    model = network()
    want = {name: float(p.detach().abs().sum()) for name, p in model.named_parameters()}
    assert run("weight", model, tmp_path) == pytest.approx(want, rel=1e-12)


def test_the_sum_is_how_much_a_small_step_lowers_the_loss(tmp_path):
    model, settings = network(), OptimizerSettings("sgd", lr=1e-5, momentum=0.0, weight_decay=0.0)
    images, labels = samples()
    found = run("contribution", model, tmp_path, update=trial_updates(settings))
    before = F.cross_entropy(model(images), labels)
    before.backward()
    torch.optim.SGD(model.parameters(), lr=1e-5).step()
    lowered = float(before.detach() - F.cross_entropy(model(images), labels).detach())
    assert lowered > 0
    assert sum(found.values()) == pytest.approx(lowered, rel=1e-3)
    assert all(value >= 0 for value in found.values()), "each is lr times a squared gradient, to first order"


def test_the_file_needs_no_more_than_is_said(tmp_path):
    model = network().float()
    units, (images, labels) = units_of(model), samples()
    size = scratch_bytes(units, SHAPES, BATCH)
    with ScratchFile(tmp_path / "scratch", size) as scratch:
        update = trial_updates(SETTINGS["sgd"])
        importance("contribution", units, images.float(), labels, chunk=2, scratch=scratch, update=update)
        assert size - 2 * 4 * BATCH * 108 - 1024 <= scratch._used <= size, "the network's input needs no room"


def test_images_are_left_alone_even_where_the_first_layer_works_in_place(tmp_path):
    images = samples()[0]
    before = images.clone()
    run("gradient", network(), tmp_path, images=images)
    assert torch.equal(images, before)
    assert images.grad is None
