"""Removing channels: the network stays the same function, gets smaller, and trains on."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from surgery_zoo import NETWORKS, SHAPE, images, kill, traced
from torch import nn
from torch.nn import functional as F

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.errors import CheckpointError
from snugfit.surgery import (
    add_penalty_gradients,
    adopt_widths,
    apply_cut,
    dead_channels,
    find_groups,
    penalty,
    penalty_scale,
    prune,
    prune_optimizer,
    width,
)


def outputs(module, shape=SHAPE):
    with torch.no_grad():
        return module.eval()(images(shape=shape))


def kill_some(draw, module, groups):
    """Kill random channels of every group, on a random side; returns the widths that must be left."""
    left = {}
    for group in groups:
        size = width(module, group)
        channels = draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size - 1))
        kill(module, draw(st.sampled_from([group.producers, group.readers])), channels)
        left[group.name] = size - len(channels)
    return left


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_without_its_dead_channels_a_network_is_the_same(name, data):
    torch.manual_seed(0)
    module, groups = traced(NETWORKS[name]())
    left = kill_some(data.draw, module, groups)
    before = outputs(module)
    cuts = prune(module, groups)
    assert torch.allclose(outputs(module), before, rtol=0, atol=1e-10)
    assert {group.name: width(module, group) for group in groups} == left
    for key, tensor in module.state_dict().items():
        assert tuple(tensor.shape) == expected_shape(cuts.get(key), tensor)
    again = find_groups(module, SHAPE)
    assert all(width(module, group) == left[group.name] for group in again if left.get(group.name, 1) > 1)
    assert prune(module, groups) == {}, "nothing is left to remove"


def expected_shape(cut, tensor):
    if cut is None:
        return tuple(tensor.shape)
    return tuple(len(cut.kept[dim]) if dim in cut.kept else size for dim, size in enumerate(cut.before))


@pytest.mark.parametrize("name", ["resnet18", "resnet18_projection", "vgg16", "mobilenet_v2"])
def test_the_projects_own_networks_are_cut(name):
    torch.manual_seed(0)
    shape = (3, 32, 32)
    module, groups = traced(models.build(name, 10, 32), shape)
    before_parameters = sum(p.numel() for p in module.parameters())
    for index, group in enumerate(groups):
        kill(module, (group.producers, group.readers)[index % 2], range(0, width(module, group), 2))
    before = outputs(module, shape)
    prune(module, groups)
    assert torch.allclose(outputs(module, shape), before, rtol=1e-10, atol=1e-10)
    assert sum(p.numel() for p in module.parameters()) < 0.6 * before_parameters


def test_what_the_layers_say_of_themselves_follows():
    module, groups = traced(NETWORKS["mobilenet"]())
    for group in groups:
        kill(module, group.readers, [0, 1])
    prune(module, groups)
    expand, depthwise, project = (module.get_submodule(f"features.1.conv.{at}") for at in ("0.0", "1.0", "2"))
    assert (expand.in_channels, expand.out_channels) == (4, 7)
    assert (depthwise.in_channels, depthwise.out_channels, depthwise.groups) == (7, 7, 7)
    assert (project.in_channels, project.out_channels) == (7, 4)
    assert module.get_submodule("features.1.conv.0.1").num_features == 7
    assert (module.classifier.in_features, module.classifier.out_features) == (10, 5)
    assert module.get_submodule("features.0.0").in_channels == 3
    rebuilt = Chain.from_module(module, SHAPE)
    assert torch.equal(rebuilt.to_module()(images()), module(images()))


@pytest.mark.parametrize("name", NETWORKS)
def test_one_channel_stays_of_a_group_that_is_dead_altogether(name):
    module, groups = traced(NETWORKS[name]())
    for group in groups:
        kill(module, (*group.producers, *group.readers), range(width(module, group)))
    before = outputs(module)
    prune(module, groups)
    assert all(width(module, group) == 1 for group in groups)
    assert torch.allclose(outputs(module), before, rtol=0, atol=1e-10)


def test_of_a_dead_group_the_strongest_channel_stays():
    module, groups = traced(NETWORKS["plain"]())
    kill(module, (*groups[0].producers, *groups[0].readers), range(6))
    kill(module, groups[0].producers[:1], [3], 1e-5)
    cuts = prune(module, groups)
    assert cuts["0.0.weight"].kept[0].tolist() == [3]


def test_a_convolution_without_weights_is_no_dead_channel_while_its_norm_makes_a_constant():
    module, groups = traced(NETWORKS["plain"]())
    kill(module, groups[0].producers[:2], [1])
    assert not dead_channels(module, groups[0]).any()
    kill(module, groups[0].producers, [1])
    assert dead_channels(module, groups[0]).nonzero().tolist() == [[1]]


def test_the_threshold_bounds_the_change():
    """Weights below the threshold on the reading side move each output by less than their sum times what they read."""
    torch.manual_seed(0)
    module, groups = traced(nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1)))
    kill(module, groups[0].readers, [0, 4], 0.9e-4)
    with torch.no_grad():
        read = F.relu(F.conv2d(images(), module.get_parameter("0.weight"), module.get_parameter("0.bias"))).max()
    before = outputs(module)
    prune(module, groups)
    assert width(module, groups[0]) == 4
    change = (outputs(module) - before).abs().max()
    assert 0 < change <= 2 * 1e-4 * read
    kill(module, groups[0].readers, [0], 1.1e-4)
    assert prune(module, groups) == {}
    assert prune(module, groups, threshold=2e-4) != {}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), lambda p: torch.optim.AdamW(p, 1e-3)]
)
def test_training_goes_on_as_it_would_have_with_dead_channels(name, make):
    """Channels that are zero on both sides get no gradient, so the smaller network keeps step with the whole one."""
    torch.manual_seed(0)
    module, groups = traced(NETWORKS[name]())
    module.eval()
    for group in groups:
        kill(module, (*group.producers, *group.readers), [1])
    optimizer = make(module.parameters())
    steps(module, optimizer, 3)
    twin = copy.deepcopy(module)
    twin_optimizer = make(twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it would share momentum
    identities = [id(parameter) for parameter in module.parameters()]
    cuts = prune(module, groups)
    assert all(slot.dim in cuts[slot.tensor].kept for group in groups for slot in group.slots)
    prune_optimizer(optimizer, module, cuts)
    assert [id(parameter) for parameter in module.parameters()] == identities
    steps(module, optimizer, 3)
    steps(twin, twin_optimizer, 3)
    assert torch.allclose(outputs(module), outputs(twin), rtol=0, atol=1e-9)
    for key, parameter in module.named_parameters():
        mine = {k: v for k, v in optimizer.state[parameter].items() if v.dim()}
        theirs = twin_optimizer.state[twin.get_parameter(key)]
        for state, value in mine.items():
            assert torch.allclose(
                value, apply_cut(theirs[state], cuts[key]) if key in cuts else theirs[state], atol=1e-9
            )


def steps(module, optimizer, count):
    labels = torch.tensor([0, 1, 2, 3])
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(module(images()), labels).backward()
        optimizer.step()


def test_hooks_and_gradients_survive():
    module, groups = traced(NETWORKS["plain"]())
    parameter, calls = module.get_parameter("2.0.weight"), []
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append(tuple(p.grad.shape)))
    labels = torch.tensor([0, 1, 2, 3])
    F.cross_entropy(module(images()), labels).backward()
    gradient = parameter.grad
    kill(module, groups[0].readers, [0])
    cuts = prune(module, groups)
    assert torch.equal(parameter.grad, apply_cut(gradient, cuts["2.0.weight"]))
    F.cross_entropy(module(images()), labels).backward()
    assert calls == [(8, 6, 3, 3), (8, 5, 3, 3)]


def test_tensors_keep_their_memory_format_and_are_really_smaller():
    module, groups = traced(NETWORKS["plain"]())
    module.to(memory_format=torch.channels_last)
    kill(module, groups[0].readers, [0])
    prune(module, groups)
    weight = module.get_parameter("2.0.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()


def test_the_penalty_makes_channels_die_and_the_network_smaller():
    """PruneTrain in small: lasso in every step, surgery every so often."""
    torch.manual_seed(0)
    module, groups = traced(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 100, 5)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.5)
    labels = torch.tensor([0, 1, 2, 3])
    scale = penalty_scale(F.cross_entropy(module(images()), labels).item(), penalty(module, groups), 0.5)
    for step in range(1, 241):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(images()), labels)
        loss.backward()
        add_penalty_gradients(module, groups, scale)
        optimizer.step()
        if step % 40 == 0:
            prune_optimizer(optimizer, module, prune(module, groups, threshold=2e-2))
    assert 1 <= width(module, groups[0]) < 16
    assert loss < 0.7


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
