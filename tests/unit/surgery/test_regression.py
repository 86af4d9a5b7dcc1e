"""The closed form, against torch's least squares on every patch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit.surgery.regression import Regression

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
