"""The linear local loss: its pooling rule, sizes and gradients."""

import pytest
import torch
from torch.nn import functional as F

from snugfit.local import NetworkFacts, UnitShape, build_local_loss, pool_kernel

NETWORK = NetworkFacts(narrowest=64, widest=512, classes=10)


@pytest.mark.parametrize(
    ("shape", "kernel", "features"),
    [
        ((64, 32, 32), (4, 4), 64 * 8 * 8),
        ((128, 16, 16), (4, 2), 128 * 4 * 8),
        ((512, 2, 2), (1, 1), 2048),
        ((100, 7, 7), (2, 1), 100 * 4 * 7),
        ((8192, 2, 2), (2, 2), 8192),
        ((8192, 1, 4), (4, 4), 8192),
    ],
)
def test_pools_until_few_enough_features_are_left(shape, kernel, features):
    assert pool_kernel(*shape) == kernel
    loss_module = build_local_loss("linear", UnitShape(shape), NETWORK)
    assert sum(p.numel() for p in loss_module.parameters()) == features * 10 + 10
    assert loss_module.predict(torch.randn(2, *shape)).shape == (2, 10)


def test_partial_windows_average_what_they_hold():
    loss_module = build_local_loss("linear", UnitShape((1000, 3, 3)), NETWORK)
    pooled = loss_module.pool(torch.ones(1, 1000, 3, 3))
    assert pooled.shape == (1, 1000, 2, 2) and torch.equal(pooled, torch.ones_like(pooled))


def test_gradients_equal_the_hand_written_loss():
    torch.manual_seed(0)
    loss_module = build_local_loss("linear", UnitShape((64, 16, 16)), NETWORK).double()
    features = torch.randn(3, 64, 16, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 9, 0])
    weight, bias = loss_module.linear.weight, loss_module.linear.bias
    pooled = features.view(3, 64, 8, 2, 8, 2).mean((3, 5)).flatten(1)
    expected = -F.log_softmax(pooled @ weight.T + bias, 1)[torch.arange(3), labels].mean()
    inputs = [features, weight, bias]
    loss = loss_module(features, labels).loss
    for got, want in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


def test_flat_output_is_one_linear_layer():
    loss_module = build_local_loss("linear", UnitShape((20,)), NETWORK)
    features = torch.randn(4, 20)
    torch.testing.assert_close(
        loss_module.predict(features), features @ loss_module.linear.weight.T + loss_module.linear.bias
    )
