"""Units taken apart around their layer of weights: the parts make the unit again, and other forms are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain
from snugfit.errors import ModelError
from snugfit.strategies.feedback.single_layer import SingleLayer


def classes_of(part):
    return [type(layer).__name__ for layer in part.children()]


def chain_of(*layers, shape=(2, 8, 8)):
    return Chain.from_module(nn.Sequential(*layers), shape)


def test_the_parts_of_a_common_network():
    chain = chain_of(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5, inplace=True),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip
    found = [SingleLayer.of(unit) for unit in chain.all_units]
    shown = [[classes_of(p) for p in (part.before, part.layer, part.response, part.after)] for part in found]
    assert shown == [
        [[], ["Conv2d"], ["BatchNorm2d", "ReLU"], ["MaxPool2d", "Dropout"]],
        [["AdaptiveAvgPool2d", "Flatten"], ["Linear"], ["Tanh"], []],
        [[], ["Linear"], [], []],
    ]
    assert [part.ends for part in found] == [False, False, True]


class Functional(nn.Module):
    """Everything but the weights is a function or a method."""

    def __init__(self):
        super().__init__()
        self.conv, self.hidden, self.out = nn.Conv2d(2, 4, 3), nn.Linear(4 * 9, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = F.max_pool2d(F.leaky_relu(self.conv(x), 0.1), 2)
        x = F.dropout(x, 0.5, training=self.training).view(x.size(0), -1)
        return self.out(torch.tanh(self.hidden(x)))


@pytest.mark.parametrize("training", [False, True])
def test_the_parts_compute_what_the_unit_computes(training):
    torch.manual_seed(0)
    chain = Chain.from_module(Functional(), (2, 8, 8))
    features = torch.randn(5, 2, 8, 8)
    for unit in chain.all_units:
        unit.module.train(training)
        part = SingleLayer.of(unit)
        torch.manual_seed(1)
        want = unit.module(features)
        torch.manual_seed(1)
        torch.testing.assert_close(part.after(part.response(part.layer(part.before(features)))), want, rtol=0, atol=0)
        features = want.detach()
    assert features.shape == (5, 3)


def test_dropout_in_place_leaves_the_answers_as_they_are():
    chain = chain_of(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Dropout(0.9, inplace=True), nn.Flatten(), nn.Linear(144, 3))
    part = SingleLayer.of(chain.units[0])
    answers = part.response(part.layer(part.before(torch.randn(2, 2, 8, 8))))
    kept = answers.clone()
    part.after(answers)
    assert torch.equal(answers, kept)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4 * 36, 3)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + torch.relu(self.a(x))).flatten(1))


class TwoPaths(nn.Module):
    """Every operation is of a known kind, but the layer's own input is used again after it."""

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = x.flatten(1)[:, :6]
        return self.head(self.a(x).reshape(-1, x.shape[1]))


class Swish(nn.Module):
    """An activation of the user's own."""

    def forward(self, x):
        return x * torch.sigmoid(x)


HEAD = (nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize(
    ("make", "shape", "said"),
    [
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), *HEAD), (2, 8, 8), "ReLU, Batch"),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(1), nn.ReLU(), *HEAD), (2, 8, 8), "AvgPool2d, ReLU"),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.PReLU(), *HEAD), (2, 8, 8), "Conv2d, PReLU"),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), Swish(), *HEAD), (2, 8, 8), "sigmoid, mul"),
        (lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 3, padding=2), *HEAD), (2, 8, 8), "ConvTranspose2d"),
        (Residual, (2, 8, 8), "Conv2d, relu, add"),
    ],
)  # fmt: skip
def test_other_forms_are_refused(make, shape, said):
    chain = Chain.from_module(make(), shape)
    with pytest.raises(ModelError, match=f"{said}.*is not one layer with at most a norm and an activation"):
        for unit in chain.all_units:
            SingleLayer.of(unit)


def test_a_unit_that_uses_its_input_again_is_refused():
    chain = Chain.from_module(TwoPaths(), (2, 2, 2))
    with pytest.raises(ModelError, match="joins paths"):
        for unit in chain.all_units:
            SingleLayer.of(unit)


def test_a_linear_layer_over_several_vectors_is_refused():
    chain = chain_of(nn.Linear(8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 3))
    with pytest.raises(ModelError, match="more than one vector"):
        SingleLayer.of(chain.units[0])
