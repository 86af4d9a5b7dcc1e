"""Local losses assigned to the units of a chain, and what each exit counts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain
from snugfit.local import LOCAL_LOSSES, NetworkStats
from snugfit.local.assignment import DetachedHeadLoss, HeadLoss, Layout
from snugfit.local.auxiliary import AuxiliaryNetwork
from snugfit.strategies.blockwise.worker import initialise_loss


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )  # fmt: skip


def layout(local_loss="aan"):
    return Layout.of(Chain.from_module(network(), (3, 8, 8), "net"), local_loss, 5)


def auxiliary_parameters(channels, filters, classes=5):
    return channels * filters * 9 + 2 * filters + 4 * filters * classes + classes


FIRST, SECOND, THIRD = 3 * 4 * 9 + 4, 4 * 6 * 9 + 6, 6 * 8 * 9 + 8
HEAD = 8 * 16 * 5 + 5


def test_network_facts_come_from_the_convs():
    assert layout().network == NetworkStats(4, 8, 5, units=2)
    assert len(layout()) == 3


def test_initial_units_get_half_the_narrowest_and_others_half_the_widest():
    losses = [layout().make_loss(i) for i in range(3)]
    assert [type(loss) for loss in losses] == [AuxiliaryNetwork, AuxiliaryNetwork, HeadLoss]
    assert [loss.filters for loss in losses[:2]] == [2, 4]


def test_local_losses_are_made_on_the_meta_device():
    assert all(parameter.is_meta for parameter in layout().make_loss(0).parameters())


def test_the_last_units_loss_is_the_head_itself():
    made = layout()
    loss = made.make_loss(2)
    assert made.is_last(2) and not made.is_last(1)
    features = torch.randn(2, 8, 4, 4)
    assert torch.equal(loss.predict(features), made.chain.head.module(features))
    assert {id(p) for p in loss.parameters()} == {id(p) for p in made.chain.head.module.parameters()}


def test_exit_parameters_by_hand():
    made = layout()
    assert made.exit_parameters(0) == FIRST + auxiliary_parameters(4, 2)
    assert made.exit_parameters(1) == FIRST + SECOND + auxiliary_parameters(6, 4)
    assert made.exit_parameters(2) == FIRST + SECOND + THIRD + HEAD == made.chain.parameters


def test_exit_parameters_are_those_of_the_exit_model():
    for name in ("aan", "classic", "linear"):
        made = layout(name)
        for index in range(3):
            assert made.exit_parameters(index) == sum(p.numel() for p in made.exit_model(index).parameters())


class Averaged(nn.Module):
    """A head that averages without a layer, and its convolutions."""

    def __init__(self, *, keeps_axes):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU())
        self.keeps_axes, self.linear = keeps_axes, nn.Linear(8, 5)

    def forward(self, x):
        return self.linear(self.convs(x).mean((2, 3), keepdim=self.keeps_axes).flatten(1))


def ends_in(*head):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), *head)


def last_local_loss(name, model):
    made = Layout.of(Chain.from_module(model, (3, 12, 12), "net"), name, 5)
    last = made.make_loss(len(made) - 1)
    initialise_loss(last.local, 1)
    return last.local.eval()


@pytest.mark.parametrize("name", ["linear", "lls", "lls-mxm"])
@pytest.mark.parametrize(
    "model",
    [
        ends_in(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        ends_in(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(8, 5)),
        Averaged(keeps_axes=True),
        Averaged(keeps_axes=False),
    ],
    ids=["adaptive", "average", "mean", "mean without axes"],
)
def test_the_last_units_own_loss_sees_no_position_that_the_heads_pool_averages_away(name, model):
    local, features = last_local_loss(name, model), torch.randn(2, 8, 8, 8)
    moved = features.flatten(2)[..., torch.randperm(64)].unflatten(2, (8, 8))
    torch.testing.assert_close(local.predict(moved), local.predict(features))


@pytest.mark.parametrize("name", ["linear", "lls", "lls-mxm"])
@pytest.mark.parametrize(
    "model",
    [
        ends_in(nn.Flatten(), nn.Linear(512, 5)),
        ends_in(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)),
        ends_in(nn.MaxPool2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    ],
    ids=["no pool", "2x2", "behind a max pool"],
)
def test_the_last_units_own_loss_sees_the_quarters_of_a_feature_map_otherwise(name, model):
    local, features = last_local_loss(name, model), torch.randn(2, 8, 8, 8)
    turned = features.rot90(dims=(2, 3))
    assert (local.predict(turned) - local.predict(features)).abs().max() > 1e-3


@pytest.mark.parametrize("name", sorted(LOCAL_LOSSES))
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_loss_has_the_layouts_label_smoothing(name, smoothing):
    """The last unit's is the head's, for losses that detach the head in addition to the unit's own."""
    chain = Chain.from_module(network(), (3, 8, 8), "net")
    made = Layout.of(chain, name, 5, label_smoothing=smoothing)
    labels = torch.tensor([0, 4, 2])
    for index in range(3):
        loss = made.make_loss(index)
        if not made.is_last(index):
            initialise_loss(loss, 1)
        elif isinstance(loss, DetachedHeadLoss):
            initialise_loss(loss.local, 1)
        features = torch.randn(3, *made.chain.units[index].map_shape)
        found = loss.eval()(features, labels)
        expected = F.cross_entropy(found.logits, labels, label_smoothing=smoothing)
        if isinstance(loss, DetachedHeadLoss):
            expected = expected + F.cross_entropy(loss.local.predict(features), labels, label_smoothing=smoothing)
        torch.testing.assert_close(found.loss, expected)
