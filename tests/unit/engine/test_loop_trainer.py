"""Steps of a caller's own loop, against plain torch in float64, with what loops and networks may do besides."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._api.loop import FitStep
from snugfit._chain import Chain
from snugfit._chain.random_numbers import random_numbers_watched
from snugfit._core.workload import OptimizerSettings
from snugfit._engine.loop_trainer import LoopNetwork
from snugfit.strategies.recomputation.schedule import Schedule

SHAPE = (3, 8, 8)
KEPT, RUN_AGAIN = "kept", "run again"


def network(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 5)]
    return nn.Sequential(*layers).double()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, *SHAPE, generator=generator).double(), torch.arange(6) % 5


def trainer_of(model, loss, how, holds=False):
    chain = Chain.from_any_module(model, SHAPE)
    count = len(chain.all_units)
    schedule = Schedule.parse(f"(0-{count - 2}) {count - 1}") if how == RUN_AGAIN else Schedule.keeping(count)
    assert schedule.recomputes == (how == RUN_AGAIN)
    settings = OptimizerSettings("sgd", lr=0.1, momentum=0.9, weight_decay=0.01)
    return LoopNetwork(model, chain, loss, settings).trainer(schedule, holds)


def plain_steps(model, loss, between=lambda model: None, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    images, targets = batch()
    for _ in range(steps):
        between(model)
        optimizer.zero_grad()
        loss(model(images), targets).backward()
        optimizer.step()
    return model


def own_steps(model, loss, how, parts, between=lambda model: None, steps=2):
    trainer, (images, targets) = trainer_of(model, loss, how, holds=parts > 1), batch()
    size = len(images) // parts
    for _ in range(steps):
        between(model)
        trainer.step(list(zip(images.split(size), targets.split(size), strict=True)))
    assert all(parameter.grad is None for parameter in model.parameters())
    return model


def assert_equal(found, expected):
    for (name, mine), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, msg=name)


def attack(model):
    """An adversarial gradient, as loops compute it between steps."""
    images, targets = batch()
    images.requires_grad_()
    F.cross_entropy(model(images), targets).backward()
    assert images.grad.abs().sum() > 0


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("how", [KEPT, RUN_AGAIN])
def test_a_backward_pass_of_the_callers_changes_no_step(how, parts):
    assert_equal(own_steps(network(), F.cross_entropy, how, parts, attack), plain_steps(network(), F.cross_entropy))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("how", [KEPT, RUN_AGAIN])
def test_a_loss_may_read_weights(how, parts):
    """A penalty gives each weight a gradient in the first of several backward passes, the layer in a later one."""

    def penalised(model):
        return lambda outputs, targets: (
            F.cross_entropy(outputs, targets) + 0.01 * sum(parameter.square().sum() for parameter in model.parameters())
        )

    mine, plain = network(), network()
    assert_equal(own_steps(mine, penalised(mine), how, parts), plain_steps(plain, penalised(plain)))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4 * 64, 5)

    def forward(self, inputs):
        return F.dropout(self.layer(inputs.flatten(1)), 0.5, self.training)


def test_functional_dropout_takes_the_mode_of_its_owner():
    def frozen():
        model = nn.Sequential(*list(network())[:6], Head().double())
        model[6].load_state_dict({"layer.weight": torch.ones(5, 256), "layer.bias": torch.zeros(5)})
        model[6].eval()
        return model

    assert_equal(own_steps(frozen(), F.cross_entropy, KEPT, 1), plain_steps(frozen(), F.cross_entropy))


class Own(nn.Module):
    """A layer of the user's own, which reads its mode, so that tracing leaves it whole."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.count, self.layer = kind, 0, nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, inputs):
        if self.training and self.kind == "draws":
            inputs = inputs * random.uniform(0.5, 1.5)
        if self.training and self.kind == "counts":
            self.count += 1
        return self.layer(inputs)


@pytest.mark.parametrize(
    ("kind", "said"), [("draws", "draws random numbers"), ("counts", "changes its"), ("plain", "")]
)
def test_what_a_second_pass_would_change_does_not_run_again(kind, said):
    layers = list(network().float())
    chain = Chain.from_any_module(nn.Sequential(*layers[:2], Own(kind), *layers[4:]), SHAPE)
    random.seed(3)
    before = random.getstate()
    reasons = chain.reasons_against_units(recomputed=True)
    assert random.getstate() == before
    assert [said in reason for reason in reasons] == ([True] if said else [])


class Tokens(nn.Module):
    """Two tokens, as many as images in the passes by which a network is analysed."""

    def __init__(self):
        super().__init__()
        self.layer, self.tokens, self.head = nn.Conv2d(3, 4, 8), nn.Parameter(torch.ones(2, 4)), nn.Linear(4, 5)

    def forward(self, images):
        found = self.layer(images).flatten(1)
        pairs = torch.stack([found, 2 * found]).view(2, images.shape[0], -1)
        return self.head(found + pairs[1] + (self.tokens / images.shape[0]).sum(0))


def test_axes_of_two_are_no_batch_axes():
    def made():
        torch.manual_seed(0)
        return Tokens().double()

    assert_equal(own_steps(made(), F.cross_entropy, KEPT, 1), plain_steps(made(), F.cross_entropy))


class Caching(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.layer, self.head, self.grid, self.count = nn.Conv2d(3, 4, 8), nn.Linear(4, 5), None, 0
        self.whole = whole

    def forward(self, images):
        found = self.layer(images).flatten(1)
        if self.whole and self.training:  # what reads its mode is not traced through
            self.count += 1
        if self.grid is None:
            self.grid = found.new_ones(4)
        self.last = found
        return self.head(found + self.grid)


@pytest.mark.parametrize("whole", [False, True])
def test_analysing_a_network_leaves_nothing_in_its_modules(whole):
    inner = Caching(whole)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), inner)
    before = dict(vars(inner))
    chain = Chain.from_any_module(model, SHAPE)
    chain.reasons_against_units(recomputed=True)
    assert vars(inner) == before and inner.grid is None and inner.count == 0 and not hasattr(inner, "last")
    assert isinstance(model(torch.zeros(2, *SHAPE)), torch.Tensor) and inner.grid.device.type == "cpu"


class Pairs(nn.Module):
    """Images in pairs: an odd batch fails."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 4, 8), nn.Linear(4, 5)

    def forward(self, images):
        found = self.layer(images).flatten(1).view(-1, 2, 4)
        return self.head((found - found.mean(1, keepdim=True)).reshape(images.size(0), -1))


def test_a_network_may_take_even_batches_alone():
    def made():
        torch.manual_seed(0)
        return Pairs().double()

    assert_equal(own_steps(made(), F.cross_entropy, KEPT, 1), plain_steps(made(), F.cross_entropy))


@pytest.mark.parametrize(
    ("layer", "count", "sizes"),
    [(nn.BatchNorm1d(4), 5, (3, 2)), (nn.BatchNorm1d(4), 6, (2, 2, 2)), (nn.BatchNorm1d(4), 1, (1,)),
     (nn.BatchNorm1d(4).eval(), 5, (2, 2, 1)), (nn.BatchNorm2d(4), 5, (2, 2, 1)), (nn.BatchNorm1d(4), 7, (2, 2, 2, 1))],
)  # fmt: skip
def test_batchnorm1d_gets_no_image_of_a_smaller_batch_alone(layer, count, sizes):
    """Of a batch of seven, which was planned for, nothing changes."""
    step = SimpleNamespace(plan=SimpleNamespace(micro_batch=2, batch_size=7), _modules=[layer])
    assert FitStep._part_sizes(step, count) == sizes


def test_random_numbers_are_kept():
    random.seed(1)
    torch.manual_seed(1)
    with random_numbers_watched() as drew:
        first = random.random(), torch.rand(())
    assert drew() and (random.random(), torch.rand(())) == first
