"""Saved weights of a smaller network give a fresh one its sizes."""

import pytest
import torch
from surgery_zoo import NETWORKS, SHAPE, images, kill, traced
from torch import nn

from snugfit._chain import Chain
from snugfit.errors import CheckpointError
from snugfit.surgery import adopt_widths, prune


def pruned(name):
    module, groups = traced(NETWORKS[name]())
    for index, group in enumerate(groups):
        kill(module, (group.producers, group.readers)[index % 2], [0, 2])
    prune(module, groups)
    return module.eval()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_round_trip(name, device):
    small = pruned(name)
    with torch.device(device):
        fresh = Chain.from_module(NETWORKS[name]().double(), SHAPE).to_module()
    adopt_widths(fresh, small.state_dict(), SHAPE)
    fresh.load_state_dict(small.state_dict(), assign=True)
    assert torch.equal(fresh.eval()(images()), small(images()))
    assert repr(fresh) == repr(small), "layers say the same of themselves"


def test_a_network_of_the_same_sizes_is_left_as_it_is():
    fresh = NETWORKS["plain"]()
    before = {key: tensor.data_ptr() for key, tensor in fresh.state_dict().items()}
    adopt_widths(fresh, NETWORKS["plain"]().state_dict(), SHAPE)
    assert {key: tensor.data_ptr() for key, tensor in fresh.state_dict().items()} == before


def test_a_single_layer_and_a_layer_norm():
    layer = nn.Linear(4, 6)
    adopt_widths(layer, {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)})
    assert (layer.in_features, layer.out_features, tuple(layer.weight.shape)) == (2, 3, (3, 2))
    norm = nn.Sequential(nn.LayerNorm(6))
    adopt_widths(norm, {"0.weight": torch.zeros(3), "0.bias": torch.zeros(3)})
    assert norm(torch.ones(2, 3)).shape == (2, 3)


BROKEN = {
    "bias of another size": lambda state: {**state, "2.0.bias": torch.zeros(9)},
    "another kernel": lambda state: {**state, "2.0.weight": torch.zeros(8, 6, 5, 5)},
    "another kind of layer": lambda state: {**state, "2.0.weight": torch.zeros(8, 6)},
    "bias without its weight": lambda state: {"2.0.bias": torch.zeros(7)},
    "no channel": lambda state: {**state, "8.weight": torch.zeros(5, 0)},
    "statistics of another size": lambda state: {**state, "2.1.running_mean": torch.zeros(7)},
    "layers that do not fit each other": lambda state: {**state, "8.weight": torch.zeros(5, 6)},
}


@pytest.mark.parametrize("name", BROKEN)
def test_weights_that_contradict_each_other(name):
    fresh = NETWORKS["plain"]()
    with pytest.raises(CheckpointError, match="belong to another model"):
        adopt_widths(fresh, BROKEN[name](fresh.state_dict()), SHAPE)


def test_a_grouped_convolution_keeps_its_groups():
    grouped = nn.Conv2d(4, 8, 1, groups=2, bias=False)
    with pytest.raises(CheckpointError):
        adopt_widths(grouped, {"weight": torch.zeros(8, 1, 1, 1)})
    with pytest.raises(CheckpointError):
        adopt_widths(grouped, {"weight": torch.zeros(7, 2, 1, 1)})
