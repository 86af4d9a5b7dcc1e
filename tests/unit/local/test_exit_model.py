"""The network cut at an exit: its outputs, and its parameters' names."""

import torch
from torch import nn

from snugfit._chain import Chain
from snugfit.local import build_local_loss
from snugfit.local.assignment import ExitModel, Layout, trunk
from snugfit.local.base import NetworkStats, UnitShape


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, stride=2), nn.ReLU())
        self.classifier = nn.Linear(6 * 16, 3)

    def forward(self, x):
        return self.classifier(self.body(self.stem(x)).flatten(1))


def classifier(channels):
    torch.manual_seed(1)
    return build_local_loss("aan", UnitShape((channels, 8, 8)), NetworkStats(4, 6, 3))


def test_the_exit_is_the_units_and_then_the_classifier():
    torch.manual_seed(0)
    model, images = Named().eval(), torch.randn(2, 1, 8, 8)
    chain, head = Chain.from_module(model, (1, 8, 8)), classifier(4).eval()
    exit_model = Layout.of(chain, "aan", 3).exit_model(0, head).eval()
    assert isinstance(exit_model, ExitModel)
    assert torch.equal(exit_model(images), head.predict(model.stem(images)))
    whole = Layout.of(chain, "aan", 3).exit_model(1)
    assert torch.equal(whole.eval()(images), model(images))


def test_the_trunk_keeps_names_and_shares_parameters():
    model = Named()
    cut = trunk(Chain.from_module(model, (1, 8, 8)), 0)
    names = dict(cut.named_parameters())
    assert set(names) == {"stem.0.weight", "stem.0.bias", "stem.1.weight", "stem.1.bias"}
    assert all(names[name] is parameter for name, parameter in model.named_parameters() if name in names)


def test_the_trunk_leaves_the_chain_whole():
    chain = Chain.from_module(Named(), (1, 8, 8))
    before = [unit.name for unit in chain.all_units]
    trunk(chain, 1)
    assert [unit.name for unit in chain.all_units] == before
    assert chain(torch.randn(1, 1, 8, 8)).shape == (1, 3)


def test_an_exit_model_trains_as_a_plain_module():
    exit_model = ExitModel(trunk(Chain.from_module(Named(), (1, 8, 8)), 0), classifier(4))
    exit_model(torch.randn(2, 1, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in exit_model.parameters())
    copied = ExitModel(trunk(Chain.from_module(Named(), (1, 8, 8)), 0), classifier(4))
    copied.load_state_dict(exit_model.state_dict())
