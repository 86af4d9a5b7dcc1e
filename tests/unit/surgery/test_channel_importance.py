"""Importance of channels: norms of activations or filters, against the plain computation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from surgery_zoo import NETWORKS, SHAPE, images, traced
from torch import nn

from snugfit.errors import ModelError, UsageError
from snugfit.lean import use_lean
from snugfit.surgery import channel_importance, most_important


def shares(*squares):
    """Squared norms of layers, each by its sum, added up."""
    return sum(layer / layer.sum() for layer in squares).sqrt()


def test_activations_are_measured_behind_their_norm_and_activation():
    """An expansion and its depthwise convolution count alike; the oracle runs whole layers."""
    module, groups = traced(NETWORKS["mobilenet"]())
    module.eval()
    group = next(g for g in groups if g.name == "features.1.conv.0.0")
    features = module.features
    with torch.no_grad():
        expanded = getattr(features, "1").conv.get_submodule("0")
        x = getattr(features, "0")
        x = x.get_submodule("2")(x.get_submodule("1")(x.get_submodule("0")(images())))
        first = expanded.get_submodule("2")(expanded.get_submodule("1")(expanded.get_submodule("0")(x)))
        depthwise = getattr(features, "1").conv.get_submodule("1")
        second = depthwise.get_submodule("2")(depthwise.get_submodule("1")(depthwise.get_submodule("0")(first)))
    expected = shares(first.square().sum((0, 2, 3)), second.square().sum((0, 2, 3)))
    found = channel_importance(module, [group], [images()])
    assert torch.allclose(found[group.name], expected, rtol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_how_images_come_makes_no_difference(name):
    module, groups = traced(NETWORKS[name]())
    module.train()
    modes = [part.training for part in module.modules()]
    whole = channel_importance(module, groups, [images(7)], micro_batch=7)
    parts = channel_importance(module, groups, images(7).split(3), micro_batch=2)
    assert list(whole) == [group.name for group in groups]
    assert all(torch.allclose(whole[key], parts[key], rtol=1e-10) for key in whole)
    assert [part.training for part in module.modules()] == modes


def test_lean_layers_are_measured_alike():
    module, groups = traced(NETWORKS["resnet"]())
    stock = channel_importance(module, groups, [images()])
    use_lean(module)
    lean = channel_importance(module, groups, [images()])
    assert all(torch.allclose(stock[key], lean[key], rtol=1e-10) for key in stock)


def test_linear_layers_are_measured_along_their_features():
    module, groups = traced(nn.Sequential(nn.Flatten(), nn.Linear(432, 6), nn.ReLU(), nn.Linear(6, 5)))
    with torch.no_grad():
        hidden = module.get_submodule("1")(images().flatten(1)).relu()
    found = channel_importance(module, groups, [images()])
    assert torch.allclose(found["1"], shares(hidden.square().sum(0)), rtol=1e-12)


def test_filters_are_measured_without_batchnorm():
    module, groups = traced(NETWORKS["mobilenet"]())
    group = next(g for g in groups if g.name == "features.1.conv.0.0")
    tensors = module.state_dict()
    expand, depthwise = (tensors[f"features.1.conv.{at}.0.weight"] for at in (0, 1))
    expected = shares(expand.square().sum((1, 2, 3)), depthwise.square().sum((1, 2, 3)))
    found = channel_importance(module, groups, by="filter")
    assert torch.allclose(found[group.name], expected, rtol=1e-12)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight)
    assert torch.equal(channel_importance(module, groups, by="filter")[group.name], found[group.name])


def test_a_silent_channel_is_the_least_important():
    module, groups = traced(NETWORKS["plain"]())
    with torch.no_grad():
        module.get_parameter("0.1.weight")[3] = 0
        module.get_parameter("0.1.bias")[3] = 0
    assert channel_importance(module, groups, [images()])["0.0"].argmin() == 3


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=12), st.data())
def test_the_most_important_are_kept(scores, data):
    count = data.draw(st.integers(1, len(scores)))
    (kept,) = most_important({"a": torch.tensor(scores)}, {"a": count}).values()
    gone = set(range(len(scores))) - set(kept)
    assert len(kept) == count and kept == sorted(set(kept))
    assert not gone or torch.tensor(scores)[kept].min() >= torch.tensor(scores)[sorted(gone)].max()


def test_what_cannot_be_measured_is_refused():
    module, groups = traced(NETWORKS["plain"]())
    with pytest.raises(UsageError, match="not by 'gamma'"):
        channel_importance(module, groups, [images()], by="gamma")
    with pytest.raises(UsageError, match="pass some"):
        channel_importance(module, groups)
    with pytest.raises(ModelError, match=r"behind layer 0\.0"):
        channel_importance(module, groups, [images() * float("nan")])
    with pytest.raises(ModelError, match="no channel of layer a would be left of 2"):
        most_important({"a": torch.ones(2)}, {"a": 0})
    with pytest.raises(UsageError, match="2 channels, not 3"):
        most_important({"a": torch.ones(2)}, {"a": 3})
    with pytest.raises(UsageError, match="b has no scores"):
        most_important({"a": torch.ones(2)}, {"b": 1})


def test_no_groups_no_scores():
    module, _ = traced(NETWORKS["plain"]())
    assert channel_importance(module, [], [images(1, SHAPE)]) == {}
