"""Which channels form groups, and which are fixed."""

import pytest
import torch
from surgery_zoo import NETWORKS, SHAPE, ResNet, conv_norm, plain, traced, vgg_like
from torch import fx, nn
from torch.nn import functional as F

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.errors import ModelError
from snugfit.surgery import Slot, find_groups, width


def groups_of(model, shape=SHAPE):
    return {group.name: group for group in find_groups(fx.symbolic_trace(model), shape)}


def test_a_convolution_goes_with_its_norm_and_its_reader():
    groups = groups_of(plain())
    assert list(groups) == ["0.0", "2.0", "4"]
    assert groups["0.0"].producers == tuple(
        Slot(f"0.{name}", 0) for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    )
    assert groups["0.0"].readers == (Slot("2.0.weight", 1),)
    assert groups["0.0"].statistics == (Slot("0.1.running_mean", 0), Slot("0.1.running_var", 0))
    assert groups["4"].readers == (Slot("8.weight", 1),)


def test_flattened_maps_are_read_in_blocks():
    groups = groups_of(vgg_like())
    assert groups["1.0"].readers == (Slot("4.weight", 1, 9),)
    assert Slot("5.weight", 0) in groups["4"].producers, "BatchNorm1d after the linear layer"


def test_additions_join_their_producers():
    groups = groups_of(ResNet())
    assert list(groups) == [
        "stem.0", "blocks.0.conv1", "blocks.0.conv2", "blocks.1.conv1", "blocks.1.conv2", "blocks.1.conv3",
        "blocks.2.conv1", "blocks.2.conv2",
    ]  # fmt: skip
    stem, last = groups["stem.0"], groups["blocks.1.conv3"]
    assert {slot.tensor for slot in stem.producers} >= {"stem.0.weight", "blocks.0.conv3.weight", "blocks.0.bn3.bias"}
    assert {slot.tensor for slot in stem.readers} == {
        "blocks.0.conv1.weight", "blocks.1.conv1.weight", "blocks.1.downsample.0.weight",
    }  # fmt: skip
    assert {slot.tensor for slot in last.producers} >= {"blocks.1.downsample.0.bias", "blocks.2.conv3.weight"}
    assert {slot.tensor for slot in last.readers} == {"blocks.2.conv1.weight", "fc.weight"}


def test_a_depthwise_convolution_goes_with_the_expansion_before_it():
    _, groups = traced(NETWORKS["mobilenet"]())
    expansion = next(group for group in groups if group.name == "features.1.conv.0.0")
    assert {slot.tensor for slot in expansion.producers} == {
        f"features.1.conv.{part}"
        for part in ("0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "1.0.weight", "1.1.weight", "1.1.bias")
    }
    assert expansion.readers == (Slot("features.1.conv.2.weight", 1),)


def test_of_a_transformer_the_hidden_units_alone():
    _, groups = traced(NETWORKS["transformer"]())
    assert [(group.name, len(group.readers)) for group in groups] == [("mlps.0.0", 1), ("mlps.1.0", 1)]


ENDS = {
    "plain": ("0.0", "8"),
    "vgg_like": ("0.0", "8"),
    "resnet": ("stem.0", "fc"),
    "mobilenet": ("features.0.0", "classifier"),
    "transformer": ("patches", "head"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_channels_of_the_input_and_the_output_are_in_no_group(name):
    module, groups = traced(NETWORKS[name]())
    places = [(slot.tensor, slot.dim) for group in groups for slot in group.slots]
    first, last = ENDS[name]
    assert module.get_parameter(f"{first}.weight").shape[1] == 3 and (f"{first}.weight", 1) not in places
    assert module.get_parameter(f"{last}.weight").shape[0] == 5 and (f"{last}.weight", 0) not in places
    assert len(set(places)) == len(places), "a place belongs to two groups"


class Between(nn.Module):
    """Two convolutions with something of the test's between them."""

    def __init__(self, function, **parts):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


class Scale(nn.Conv2d):
    """A convolution that reads its weight in its own way."""


KNOWN = {
    "relu": lambda net, x: F.relu(x),
    "method": lambda net, x: x.relu_().clone(),
    "pool": lambda net, x: F.max_pool2d(x, 3, 1, 1),
    "twice": lambda net, x: x + F.relu(x),
}
UNKNOWN = {
    "concatenation": lambda net, x: torch.cat((x[:, :2], x[:, 2:]), 1),
    "sigmoid": lambda net, x: torch.sigmoid(x),
    "product": lambda net, x: x * F.relu(x),
    "shift": lambda net, x: x + 1,
    "itself": lambda net, x: x + x,
    "transpose": lambda net, x: x.transpose(2, 3),
    "reshape": lambda net, x: x.reshape(-1, 4, SHAPE[1], SHAPE[2]),
    "padding": lambda net, x: F.pad(x, (0, 0, 0, 0, 0, 0)),
    "channel mean": lambda net, x: x + x.mean(1, keepdim=True),
    "softmax": lambda net, x: torch.softmax(x, 1),
    "broadcast": lambda net, x: x + F.adaptive_avg_pool2d(x, 1),
    "weights used twice": lambda net, x: x + F.conv2d(x, net.first.weight[:, :1].expand(4, 4, 1, 1)),
}
LAYERS = {
    "grouped": nn.Conv2d(4, 4, 3, padding=1, groups=2),
    "widening": nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.Conv2d(8, 4, 1, groups=4)),
    "group norm": nn.GroupNorm(2, 4),
    "norm without weights": nn.BatchNorm2d(4, affine=False),
    "prelu": nn.PReLU(4),
    "sigmoid": nn.Sigmoid(),
    "linear on width": nn.Linear(SHAPE[2], SHAPE[2]),
    "transposed": nn.ConvTranspose2d(4, 4, 1),
    "subclass": Scale(4, 4, 1),
    "weight of a function": nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
    "unflatten": nn.Unflatten(1, (2, 2)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_functions_are_followed(name):
    assert list(groups_of(Between(KNOWN[name]))) == ["first"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_functions_fix_the_channels(name):
    assert groups_of(Between(UNKNOWN[name])) == {}


@pytest.mark.parametrize("name", LAYERS)
def test_unknown_layers_fix_the_channels(name):
    def through(net, x):
        return net.middle(x).flatten(1, 2) if name == "unflatten" else net.middle(x)

    assert "first" not in groups_of(Between(through, middle=LAYERS[name]))


def test_a_layer_that_is_called_twice_is_fixed():
    net = Between(lambda net, x: net.middle(net.middle(x)), middle=nn.Conv2d(4, 4, 1))
    assert groups_of(net) == {}


def test_tied_weights_are_fixed():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    net[1].weight = net[0].weight
    assert groups_of(net) == {}


def test_channels_that_leave_the_network_as_well_are_fixed():
    class Tap(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = conv_norm(3, 4), nn.Conv2d(4, 3, 1)

        def forward(self, x):
            x = self.first(x)
            return self.last(x), x

    assert groups_of(Tap()) == {}


def test_pools_and_norms_of_tokens_are_not_taken_for_those_of_channels():
    class Tokens(nn.Module):
        def __init__(self, middle):
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(6, 5), middle, nn.Linear(5, 4)

        def forward(self, x):
            return self.last(self.middle(self.first(x)))

    assert list(groups_of(Tokens(nn.GELU()), (5, 6))) == ["first"]
    assert groups_of(Tokens(nn.BatchNorm1d(5)), (5, 6)) == {}
    assert groups_of(Tokens(nn.MaxPool1d(3, 1, 1)), (5, 6)) == {}


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet18", 8), ("resnet18_projection", 12), ("vgg16", 13), ("mobilenet_v2", 25), ("mobilenet_v1", 14)],
)
def test_the_projects_own_networks(name, count):
    with torch.device("meta"):
        module = Chain.from_module(models.build(name, 10, 32), (3, 32, 32)).to_module()
    groups = find_groups(module, (3, 32, 32))
    assert len(groups) == count
    assert all(width(module, group) > 1 for group in groups)


def test_a_wrong_input_is_told():
    with pytest.raises(ModelError, match="channels cannot be followed"):
        find_groups(fx.symbolic_trace(plain()), (1, 12, 12))
