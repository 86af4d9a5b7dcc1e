"""Large weights are updated by parts of their gradients where every weight has one layer."""

import copy
import weakref

import pytest
import torch
from torch import nn

from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit.lean import LeanConv2d, by_position, convolution
from snugfit.local.assignment import Layout
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.blockwise.worker import LocalUnit
from snugfit.strategies.full_network import by_own_loss

SHAPE, CLASSES = (3, 8, 8), 5


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    for module in (by_position, convolution):
        monkeypatch.setattr(module, "PART_VALUES", 1000)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU(), nn.Flatten(),
        nn.Linear(2048, CLASSES),
    ).to(torch.float64, memory_format=torch.channels_last)  # fmt: skip


def trainer_of(model, optimizer="sgd", **changes):
    chain = Chain.from_module(model, SHAPE)
    module = chain.to_module()
    settings = OptimizerSettings(optimizer, lr=0.05, **changes)
    work = Workload("net", "data", SHAPE, CLASSES, 8, 4, 4, optimizer=settings)
    return by_own_loss(lambda chain: chain.forward)(chain, module, work, 1)


def batch(device="cpu"):
    torch.manual_seed(1)
    images = torch.randn(8, *SHAPE, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    return images.to(device), torch.arange(8, device=device) % CLASSES


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_steps_equal_those_of_torch(optimizer, order):
    model = network().to(memory_format=order)
    plain = copy.deepcopy(model)
    trainer = trainer_of(model, optimizer, weight_decay=0.01)
    others = {"sgd": lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.01),
              "adamw": lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.01)}  # fmt: skip
    theirs, (images, labels) = others[optimizer](plain.parameters()), batch()
    for _ in range(4):
        loss = nn.functional.cross_entropy(plain(images), labels)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        assert trainer.step(images, labels).loss == pytest.approx(loss.item(), rel=1e-9)
    for mine, other in zip(trainer.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
    assert all(each.grad is None for each in trainer.module.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_whole_gradient_is_never_in_memory(monkeypatch, device):
    model = network().to(device)
    in_parts = trainer_of(copy.deepcopy(model))
    whole = trainer_of(copy.deepcopy(model))
    with monkeypatch.context() as patch:
        patch.setattr(LeanConv2d, "_update_of", lambda self, weight: None)
        expected = tensor_peak_bytes(lambda: whole.step(*batch(device)), whole.modules, repeats=2)
    found = tensor_peak_bytes(lambda: in_parts.step(*batch(device)), in_parts.modules, repeats=2)
    assert expected - found > 0.5 * 8 * 64 * 128 * 9, (expected, found)


def test_a_part_is_freed_before_the_next_one_is_made(monkeypatch):
    made, alive = [], []
    compute = by_position.weight_gradient

    def observed(*args):
        alive.append(sum(each() is not None for each in made))
        part = compute(*args)
        made.append(weakref.ref(part.untyped_storage()))
        return part

    monkeypatch.setattr(by_position, "weight_gradient", observed)
    trainer = trainer_of(network())
    trainer.step(*batch())
    assert len(alive) >= 32 and not any(alive)


def test_averaged_weights_get_their_gradients_whole():
    trainer = trainer_of(network(), ema=0.9)
    assert all(each.update is None for each in trainer.module.modules() if isinstance(each, LeanConv2d))


class Twice(nn.Module):
    """A network that runs a layer twice in one unit, or reads its weight."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.head, self.reads = nn.Linear(512, CLASSES), reads

    def forward(self, images):
        maps = self.first(images)
        other = self.layer.weight.mean() if self.reads else self.layer(maps.tanh())
        return self.head((maps + self.layer(maps) + other).flatten(1))


class Block(nn.Module):
    """Stays whole, because it reads its mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, maps):
        return self.layer(maps) if self.training else self.layer(maps) * 1


class Inside(Twice):
    """Calls a layer directly, and in a module that stays whole."""

    def __init__(self):
        super().__init__(reads=False)
        self.layer, self.block = nn.Identity(), Block()

    def forward(self, images):
        maps = self.first(images)
        return self.head((self.block(maps) + self.block.layer(maps.tanh())).flatten(1))


class Both(nn.Module):
    """Runs a graph of the user twice, and stays whole."""

    def __init__(self):
        super().__init__()
        self.graph = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1)))

    def forward(self, maps):
        return self.graph(maps) + self.graph(maps.tanh()) * (2 if self.training else 1)


class Siamese(Twice):
    """Has a graph of the user in a module that stays whole."""

    def __init__(self):
        super().__init__(reads=False)
        self.layer = Both()

    def forward(self, images):
        return self.head(self.layer(self.first(images)).flatten(1))


def hooked():
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, stride=2), nn.Conv2d(32, 32, 3, padding=1), nn.Flatten())
    model[1].register_forward_hook(lambda layer, inputs, output: output * layer.weight.square().mean())
    return model.append(nn.Linear(512, CLASSES))


@pytest.mark.parametrize("make", [Inside, Siamese, hooked])
def test_whatever_else_reads_a_weight_it_gets_the_sum_of_its_gradients(make):
    torch.manual_seed(0)
    assert_step_of_torch(make().to(torch.float64, memory_format=torch.channels_last))


class Ending(nn.Module):
    """Ends in a head that runs a layer twice."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.one, self.other = nn.Linear(512, CLASSES), nn.Linear(512, CLASSES)

    def forward(self, images):
        maps = self.first(images)
        return self.one(self.layer(maps).flatten(1)) + self.other(self.layer(maps.tanh()).flatten(1))


def test_a_head_that_runs_a_layer_twice_gets_the_sum_of_its_gradients():
    torch.manual_seed(0)
    model = Ending().to(torch.float64, memory_format=torch.channels_last)
    plain, (images, labels) = copy.deepcopy(model), batch()
    chain = Chain.from_module(model, SHAPE)
    work = Workload("net", "data", SHAPE, CLASSES, 8, 4, 4, optimizer=OptimizerSettings("sgd", lr=0.05))
    layout = Layout.of(chain, "aan", CLASSES, [len(chain.units)])
    LocalUnit(layout.modules[0].module, layout.make_loss(0), work).step(images, labels)
    step_of_torch(plain, images, labels)
    torch.testing.assert_close(chain.to_module().state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("reads", [False, True])
def test_a_weight_that_is_used_twice_gets_the_sum_of_its_gradients(reads):
    torch.manual_seed(0)
    assert_step_of_torch(Twice(reads=reads).to(torch.float64, memory_format=torch.channels_last))


def assert_step_of_torch(model):
    plain, (images, labels) = copy.deepcopy(model), batch()
    trainer = trainer_of(model)
    step_of_torch(plain, images, labels)
    trainer.step(images, labels)
    torch.testing.assert_close(trainer.module.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-11)


def step_of_torch(plain, images, labels):
    nn.functional.cross_entropy(plain(images), labels).backward()
    torch.optim.SGD(plain.parameters(), 0.05, 0.9, weight_decay=5e-4).step()
