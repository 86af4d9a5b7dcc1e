"""What each feedback rule gives every weight, against the papers' formulas written out in matrices."""

import copy
from dataclasses import replace

import pytest
import torch
from strategy_samples import workload
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings
from snugfit.strategies.feedback.strategy import TRAINERS

IMAGES = torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2])
SGD = OptimizerSettings("sgd", lr=0.1, momentum=0.0, weight_decay=0.0)
WORK = replace(workload(optimizer=SGD, seed=7), classes=3)


def network(norm=False, dropout=0.0):
    """A convolution, a hidden linear layer and an output layer, that train in float64."""
    torch.manual_seed(0)
    norms = ([nn.BatchNorm2d(4)], [nn.BatchNorm1d(5)]) if norm else ([], [])
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), *norms[0], nn.Tanh(), nn.MaxPool2d(2), nn.Dropout(dropout),
        nn.Flatten(), nn.Linear(36, 5), *norms[1], nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3),
    )  # fmt: skip


def trainer(rule, module, micro_batches=1, work=WORK):
    chain = Chain.from_module(module, (2, 6, 6))
    return TRAINERS[rule](chain, module.double(), work, micro_batches)


def held_gradients(rule, module, images=IMAGES, labels=LABELS):
    """The gradients of weights and biases in order, and the rule's matrices."""
    made = trainer(rule, module, micro_batches=2)
    made.step(images, labels, share=1.0, update=False)
    layers = [layer for layer in module if isinstance(layer, (nn.Conv2d, nn.Linear))]
    return [(layer.weight.grad, layer.bias.grad) for layer in layers], made.matrices


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert float(want.detach().abs().max()) > 1e-6, "there is nothing to compare"


def unfolded(images):
    """Patches (B, C * 9, positions) that a 3x3 convolution with padding 1 multiplies."""
    return F.unfold(images, 3, padding=1)


class ByHand:
    """One pass through :func:`network` in matrices: sums z, answers h and inputs of each layer."""

    def __init__(self, module, images, norm=False):
        (w1, b1), (w2, b2), (w3, b3) = ((m.weight, m.bias) for m in module if isinstance(m, (nn.Conv2d, nn.Linear)))
        self.patches = unfolded(images)
        sums = w1.flatten(1) @ self.patches + b1[:, None]
        self.answers = torch.tanh(self.normalised(sums, (0, 2)) if norm else sums)
        windows = self.answers.view(-1, 4, 3, 2, 3, 2).permute(0, 1, 2, 4, 3, 5).flatten(4)
        self.winners, self.pooled = windows.argmax(-1), windows.amax(-1).flatten(1)
        sums = self.pooled @ w2.T + b2
        self.hidden = torch.tanh(self.normalised(sums, (0,)) if norm else sums)
        self.error = (self.hidden @ w3.T + b3).softmax(1) - torch.eye(3, dtype=torch.float64)[LABELS]

    @staticmethod
    def normalised(sums, axes):
        mean = sums.mean(axes, keepdim=True)
        return (sums - mean) / (((sums - mean) ** 2).mean(axes, keepdim=True) + 1e-5).sqrt()

    def direct(self, to_pooled, to_hidden):
        """Gradients when these signals (B, ...) stand in for those of the two hidden outputs; the last one's is true.

        Each goes through its own layer's pool and tanh' alone.
        """
        to_windows = F.one_hot(self.winners, 4) * to_pooled.view(-1, 4, 3, 3)[..., None]
        to_map = to_windows.view(-1, 4, 3, 3, 2, 2).permute(0, 1, 2, 4, 3, 5).reshape(-1, 4, 36)
        first = to_map * (1 - self.answers**2)
        second = to_hidden * (1 - self.hidden**2)
        last = self.error / 6
        return [
            (torch.einsum("bnp,bip->ni", first, self.patches).view(4, 2, 3, 3), first.sum((0, 2))),
            (second.T @ self.pooled, second.sum(0)),
            (last.T @ self.hidden, last.sum(0)),
        ]


def assert_pairs(got, want):
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            close(a, b)


@torch.no_grad()
def test_dfa_by_hand():
    module = network()
    with torch.enable_grad():
        got, (first, second) = held_gradients("dfa", module)
    assert first.shape == (3, 4, 3, 3) and second.shape == (3, 5)
    one = ByHand(module, IMAGES)
    assert_pairs(got, one.direct(one.error @ first.flatten(1) / 6, one.error @ second / 6))


@torch.no_grad()
def test_drtp_by_hand():
    module = network()
    with torch.enable_grad():
        got, (first, second) = held_gradients("drtp", module)
    target = torch.eye(3, dtype=torch.float64)[LABELS]
    one = ByHand(module, IMAGES)
    assert_pairs(got, one.direct(-target @ first.flatten(1) / 6, -target @ second / 6))


@pytest.mark.parametrize("norm", [False, True])
@torch.no_grad()
def test_pepita_by_hand(norm):
    """dW_l = (h_l - h_l^err) (h_(l-1)^err)^T, and e (h_(L-1)^err)^T of the first pass's error; no tanh' anywhere."""
    module = network(norm)
    with torch.enable_grad():
        got, (matrix,) = held_gradients("pepita", module)
    assert matrix.shape == (3, 2, 6, 6)
    one = ByHand(module, IMAGES, norm)
    two = ByHand(module, IMAGES + (one.error @ matrix.flatten(1)).view_as(IMAGES), norm)
    first, second, last = (one.answers - two.answers) / (6 * 36), (one.hidden - two.hidden) / 6, one.error / 6
    want = [
        (torch.einsum("bnp,bip->ni", first, two.patches).view(4, 2, 3, 3), first.sum((0, 2))),
        (second.T @ two.pooled, second.sum(0)),
        (last.T @ two.hidden, last.sum(0)),
    ]
    assert_pairs(got, want)
    norms = [p for m in module if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)) for p in m.parameters()]
    assert len(norms) == 4 * norm and all(parameter.grad is None for parameter in norms)


def test_dfa_through_the_true_weights_is_backpropagation():
    """In a linear network the output depends on h_l by W_L ... W_(l+1): their transposed product carries the error."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, 7), nn.Linear(7, 6), nn.Linear(6, 5), nn.Linear(5, 3))
    theirs = copy.deepcopy(module).double()
    F.cross_entropy(theirs(IMAGES), LABELS).backward()
    made = trainer("dfa", module, micro_batches=2)
    product = torch.eye(3, dtype=torch.float64)
    for matrix, layer in zip(reversed(made.matrices), reversed(module), strict=False):
        product = product @ layer.weight.detach()
        matrix.copy_(product)
    made.step(IMAGES, LABELS, update=False)
    for mine, other in zip(module.parameters(), theirs.parameters(), strict=True):
        close(mine.grad, other.grad)


def test_dfa_through_the_true_jacobian_of_a_convolutional_network_is_backpropagation():
    torch.manual_seed(2)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(4, 5, 3, stride=2), nn.Flatten(), nn.Linear(5, 3)
    )  # fmt: skip
    theirs = copy.deepcopy(module).double()
    F.cross_entropy(theirs(IMAGES), LABELS).backward()
    made = trainer("dfa", module, micro_batches=2)
    for matrix, rest in zip(made.matrices, (module[2:], module[3:]), strict=True):
        point = torch.zeros(1, *matrix.shape[1:], dtype=torch.float64)
        matrix.copy_(torch.autograd.functional.jacobian(rest, point)[0, :, 0])
    made.step(IMAGES, LABELS, update=False)
    for mine, other in zip(module.parameters(), theirs.parameters(), strict=True):
        close(mine.grad, other.grad)


def test_drtp_needs_nothing_of_later_layers():
    """Neither their weights, which may be anything, nor their turn: the first layer is updated before the next runs."""
    sound, broken = network(), network()
    made = trainer("drtp", sound)
    with torch.no_grad():
        broken[5].weight.fill_(float("nan"))
        broken[8].weight.fill_(float("nan"))
    before = sound[0].weight.detach().clone()
    seen = []
    sound[5].register_forward_pre_hook(lambda layer, inputs: seen.append((sound[0].weight.detach().clone(), inputs[0])))
    expected = sound[:5](IMAGES).detach().flatten(1)
    made.step(IMAGES, LABELS)
    trainer("drtp", broken).step(IMAGES, LABELS)
    close(broken[0].weight, sound[0].weight)
    ((weight, features),) = seen
    assert not torch.equal(weight, before) and torch.equal(weight, sound[0].weight)
    close(features, expected)


@pytest.mark.parametrize("rule", ["dfa", "pepita"])
def test_the_other_rules_wait_for_the_error(rule):
    """The counterpart: what DRTP is free of can be seen in the others."""
    sound, other = network(), network()
    with torch.no_grad():
        other[8].weight.mul_(3)
    for module in (sound, other):
        trainer(rule, module).step(IMAGES, LABELS)
    assert float((other[0].weight - sound[0].weight).detach().abs().max()) > 1e-6


@pytest.mark.parametrize("rule", TRAINERS)
def test_a_step_subtracts_what_the_rule_gives(rule):
    """Applied at once or accumulated over micro-batches."""
    start, whole, parts = network(), network(), network()
    want, _ = held_gradients(rule, start)
    result = trainer(rule, whole).step(IMAGES, LABELS)
    made = trainer(rule, parts, micro_batches=3)
    for index in range(3):
        some = slice(2 * index, 2 * index + 2)
        made.step(IMAGES[some], LABELS[some], share=1 / 3, update=index == 2)
    for module in (whole, parts):
        for (weight, bias), layer, old in zip(want, layers(module), layers(network().double()), strict=True):
            close(old.weight - layer.weight, 0.1 * weight)
            close(old.bias - layer.bias, 0.1 * bias)
        assert all(parameter.grad is None for parameter in module.parameters())
    logits = network().double()(IMAGES)
    assert result.loss == pytest.approx(F.cross_entropy(logits, LABELS).item(), rel=1e-12)
    assert result.correct == int((logits.argmax(1) == LABELS).sum())


def layers(module):
    return [layer for layer in module if isinstance(layer, (nn.Conv2d, nn.Linear))]


def test_both_passes_of_pepita_draw_the_same_dropout():
    """Without an error to carry, the passes are equal and hidden layers have nothing to learn."""
    module = network(dropout=0.5)
    made = trainer("pepita", module, micro_batches=2)
    made.matrices[0].zero_()
    made.step(IMAGES, LABELS, update=False)
    for layer in layers(module)[:2]:
        assert float(layer.weight.grad.abs().max()) == 0.0
    torch.manual_seed(0)
    first = made.step(IMAGES, LABELS, update=False).loss
    assert made.step(IMAGES, LABELS, update=False).loss != first, "every step draws anew"


@pytest.mark.parametrize("rule", TRAINERS)
def test_frozen_weights_stay(rule):
    module = network(norm=True)
    for layer in (module[0], module[1], module[9]):
        layer.requires_grad_(False)
    made = trainer(rule, module)
    before = copy.deepcopy(module.state_dict())
    made.step(IMAGES, LABELS)
    assert torch.equal(module[0].weight, before["0.weight"])
    assert not torch.equal(module[6].weight, before["6.weight"])


@pytest.mark.parametrize("rule", TRAINERS)
def test_matrices_belong_to_the_seed_and_to_no_checkpoint(rule):
    one, two = (trainer(rule, network()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.matrices, two.matrices, strict=True))
    if len(one.matrices) > 1:
        first, second = (matrix.flatten()[:15] / matrix.std() for matrix in one.matrices)
        assert not torch.allclose(first / first.norm(), second / second.norm()), "every layer has its own"
    other = trainer(rule, network(), work=replace(WORK, seed=8))
    assert not torch.equal(one.matrices[0], other.matrices[0])
    assert set(one.state()["model"]) == set(network().state_dict())
    held = sum(buffer.nbytes for buffer in one.modules[1].buffers())
    assert held == 8 * 3 * {"dfa": 36 + 5, "drtp": 36 + 5, "pepita": 72}[rule]
