"""Channels that stay are those from which the next layer is rebuilt best."""

import pytest
import torch
from surgery_zoo import NETWORKS
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain
from snugfit.errors import UsageError
from snugfit.surgery import channels_by_reconstruction, hidden_groups, width
from snugfit.surgery.reconstruction import RIDGE, Regression, eliminate_channels

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


GEOMETRIES = [
    {"kernel_size": 1},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 1), "padding": (2, 0), "dilation": (2, 1)},
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("intercept", [True, False])
def test_with_no_ridge_to_speak_of_it_is_least_squares(geometry, intercept):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 2, bias=intercept, **geometry).double()
    inputs = torch.randn(6, 3, 9, 8, dtype=torch.float64)
    targets = torch.randn_like(layer(inputs))
    regression = Regression(layer)
    for part in (slice(0, 4), slice(4, 6)):
        regression.add(inputs[part], targets[part])
    weight, shift = regression.solve(1e-14, intercept)
    columns = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    rows = columns.transpose(1, 2).flatten(0, 1)
    if intercept:
        rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1)
    wanted = torch.linalg.lstsq(rows, targets.flatten(2).transpose(1, 2).flatten(0, 1)).solution
    assert torch.allclose(weight.flatten(1).T, wanted[: weight[0].numel()], atol=1e-9)
    assert torch.allclose(shift, wanted[-1] if intercept else torch.zeros(2, dtype=torch.float64), atol=1e-9)


def test_a_linear_layer_is_solved_alike():
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    truth = nn.Linear(4, 3)
    inputs = torch.randn(50, 4)
    regression = Regression(layer)
    with torch.no_grad():
        regression.add(inputs, truth(inputs))
    weight, shift = regression.solve(1e-12, True)
    assert torch.allclose(weight, truth.weight, atol=1e-5) and torch.allclose(shift, truth.bias, atol=1e-5)
    assert weight.dtype == torch.float32


def test_a_heavy_ridge_keeps_the_weight():
    layer = nn.Conv2d(3, 2, 1)
    regression = Regression(layer)
    regression.add(torch.randn(2, 3, 4, 4), torch.randn(2, 2, 4, 4))
    assert torch.allclose(regression.solve(1e9, False)[0], layer.weight, atol=1e-6)


def test_inputs_that_are_always_zero_keep_their_weights():
    layer = nn.Conv2d(3, 2, 1)
    regression = Regression(layer)
    inputs = torch.randn(2, 3, 4, 4)
    inputs[:, 1] = 0
    regression.add(inputs, torch.randn(2, 2, 4, 4))
    weight, shift = regression.solve(1e-3, True)
    assert (
        torch.equal(weight[:, 1], layer.weight[:, 1]) and torch.isfinite(weight).all() and torch.isfinite(shift).all()
    )


def test_of_large_maps_some_pixels_are_taken_always_the_same():
    layer, other = nn.Conv2d(2, 2, 1), None
    inputs, targets = torch.randn(3, 2, 40, 40), torch.randn(3, 2, 40, 40)
    found = []
    for _ in range(2):
        other = Regression(layer)
        other.add(inputs, targets)
        found.append(other.solve(1e-3, True)[0])
    assert other.count == 3 * 512 and torch.equal(*found)


@pytest.mark.parametrize(
    ("layer", "serves"),
    [
        (nn.Conv2d(4, 4, 3), True),
        (nn.Linear(2048, 2), True),
        (nn.Linear(2049, 2), False),
        (nn.Conv2d(256, 2, 3), False),
        (nn.Conv2d(4, 4, 3, groups=4), False),
        (nn.Conv2d(4, 4, 3, padding="same"), False),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), False),
        (nn.Conv1d(4, 4, 3), False),
    ],
)
def test_which_layers_it_serves(layer, serves):
    assert Regression.serves(layer) is serves
