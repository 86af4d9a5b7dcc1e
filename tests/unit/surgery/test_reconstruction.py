"""Channels that stay are those from which the next layer is rebuilt best."""

import pytest
import torch
from surgery_zoo import NETWORKS
from torch import nn

from snugfit._chain import Chain
from snugfit.errors import UsageError
from snugfit.surgery import channels_by_reconstruction, hidden_groups, width
from snugfit.surgery.reconstruction import RIDGE, eliminate_channels

SHAPE = (3, 16, 16)


def images(count=16):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(1))


def lost(moments, weights, alive):
    """Squared error of the best weights on the features that are left, with the same ridge: the obvious way."""
    ridged = moments + RIDGE * moments.diagonal().mean() * torch.eye(len(moments), dtype=moments.dtype)
    found = torch.zeros_like(weights)
    found[alive] = torch.linalg.solve(ridged[alive][:, alive], (ridged @ weights)[alive])
    error = found - weights
    return torch.einsum("fo,fg,go->", error, ridged, error) / torch.einsum("fo,fg,go->", weights, moments, weights)


def obvious(sums, channels, keep):
    left = list(range(channels))
    while len(left) > keep:
        errors = {}
        for channel in left:
            rest = [each for each in left if each != channel]
            size = len(sums[0][1]) // channels
            features = [each * size + at for each in rest for at in range(size)]
            errors[channel] = sum(lost(moments, weights, features) for moments, weights in sums)
        left.remove(min(errors, key=errors.get))
    return left


@pytest.mark.parametrize(("features", "readers"), [(1, 1), (1, 2), (4, 1)])
def test_as_the_obvious_search(features, readers):
    torch.manual_seed(0)
    channels, sums = 6, []
    for _ in range(readers):
        inputs = torch.randn(50, channels * features, dtype=torch.float64) @ torch.randn(
            channels * features, channels * features, dtype=torch.float64
        )
        sums.append((inputs.T @ inputs, torch.randn(channels * features, 3, dtype=torch.float64)))
    for keep in (1, 3, 5, 6):
        assert eliminate_channels(sums, channels, keep) == obvious(sums, channels, keep)


def test_the_larger_of_two_that_say_the_same_may_go():
    """By size the small one with something of its own would go, and the error would be its whole part."""
    inputs = torch.randn(200, 3, dtype=torch.float64)
    inputs = torch.stack([9 * inputs[:, 0], 9 * inputs[:, 0] + 0.01 * inputs[:, 2], 0.5 * inputs[:, 1]], 1)
    assert 2 in eliminate_channels([(inputs.T @ inputs, torch.ones(3, 2, dtype=torch.float64))], 3, 2)


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_every_group_keeps_its_width(name):
    torch.manual_seed(0)
    module = Chain.from_module(NETWORKS[name](), SHAPE).to_module()
    groups = [group for found in hidden_groups(module, SHAPE).values() for group in found]
    widths = {group.name: width(module, group) // 2 for group in groups[1:]}
    kept = channels_by_reconstruction(module, groups, widths, lambda: images().split(8))
    assert kept.keys() == widths.keys() and {name: len(found) for name, found in kept.items()} == widths
    assert all(found == sorted(set(found)) for found in kept.values())
    again = channels_by_reconstruction(module, groups, widths, lambda: images().split(8), micro_batch=3)
    assert again == kept, "however many images are run at once"
    assert not any(layer._forward_hooks for layer in module.modules())


def test_what_cannot_be_solved_for_is_ranked_by_activations(monkeypatch):
    module = Chain.from_module(NETWORKS["resnet"](), SHAPE).to_module()
    groups = [group for found in hidden_groups(module, SHAPE).values() for group in found]
    widths = {groups[0].name: 2}
    monkeypatch.setattr("snugfit.surgery.reconstruction.Regression.serves", lambda layer: False)
    assert len(channels_by_reconstruction(module, groups, widths, lambda: [images()])[groups[0].name]) == 2


def test_it_needs_images():
    module = Chain.from_module(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 1)), SHAPE)
    traced = module.to_module()
    groups = [group for found in hidden_groups(traced, SHAPE).values() for group in found]
    with pytest.raises(UsageError, match="images"):
        channels_by_reconstruction(traced, groups, {groups[0].name: 4}, lambda: [])
