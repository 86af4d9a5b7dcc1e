"""Chains put together by hand."""

import pytest
import torch
from chain_zoo import SHAPE, run_checking_inputs
from torch import nn

from snugfit._chain import Chain, ConvFact
from snugfit.errors import ModelError


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList([nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, 2)) for _ in range(2)])
        self.fc = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            if x.shape[-1] > 1:
                x = layer(x)
        return self.fc(x)


def by_hand(model):
    parts = [("stem", model.stem), *((f"layers.{i}", layer) for i, layer in enumerate(model.layers))]
    return Chain.from_units(parts, head=("fc", model.fc), input_shape=SHAPE, name="mine")


def test_state_dict_names_are_the_models_and_load_back():
    model = Untraceable()
    chain = by_hand(model)
    assert set(chain.to_module().state_dict()) == set(model.state_dict())
    assert list(chain.units[1].module.state_dict()) == ["layers.0.1.weight", "layers.0.1.bias"]
    other = Untraceable()
    other.load_state_dict(chain.to_module().state_dict())
    x = torch.randn(2, *SHAPE)
    assert torch.equal(run_checking_inputs(chain, x), other(x))
    assert torch.equal(chain.to_module()(x), other(x))


def test_facts_and_shapes():
    chain = by_hand(Untraceable())
    assert chain.name == "mine"
    assert [unit.output_shape for unit in chain.all_units] == [(4, 16, 16), (4, 7, 7), (4, 3, 3), (5,)]
    assert chain.units[1].convs == (ConvFact("layers.0.1", 4, 4, (3, 3), (2, 2), 1, (16, 16), (7, 7)),)


def test_untraceable_as_a_whole():
    with pytest.raises(ModelError, match=r"Chain\.from_units"):
        Chain.from_module(Untraceable(), SHAPE)


def test_in_place_dropout_first_in_a_unit_of_the_users_own_class_leaves_the_input_alone():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.conv(nn.functional.dropout(x, 0.5, self.training, inplace=True))

    chain = Chain.from_units([("a", Dropping())], head=("b", Dropping()), input_shape=SHAPE)
    run_checking_inputs(chain, torch.randn(2, *SHAPE))


CONV = nn.Conv2d(3, 3, 1)


@pytest.mark.parametrize(
    ("units", "head", "message"),
    [
        ([], ("fc", CONV), "nothing to split"),
        ([("a", CONV)], ("a", nn.Conv2d(3, 3, 1)), "repeat"),
        ([("a", CONV)], ("a.b", nn.Conv2d(3, 3, 1)), "lie within"),
        ([("a", CONV)], ("b", CONV), "tied weights"),
        ([("a", CONV)], ("b", nn.Linear(7, 5)), "unit b does not run on an input of shape 3x16x16"),
        ([("a", nn.LSTM(16, 4))], ("b", nn.Linear(7, 5)), "unit a"),
    ],
)
def test_errors(units, head, message):
    with pytest.raises(ModelError, match=message):
        Chain.from_units(units, head=head, input_shape=SHAPE)
