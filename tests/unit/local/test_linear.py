"""The linear local loss: its size and gradients."""

import pytest
import torch
from torch.nn import functional as F

from snugfit.local import NetworkStats, UnitShape, build_local_loss

NETWORK = NetworkStats(narrowest=64, widest=512, classes=10)


@pytest.mark.parametrize(
    ("shape", "values"), [((128, 32, 32), 2048), ((256, 8, 8), 1024), ((4096, 2, 2), 4096), ((12,), 12)]
)
def test_it_trains_one_projection_of_the_latents(shape, values):
    loss = build_local_loss("linear", UnitShape(shape), NETWORK)
    assert sum(p.numel() for p in loss.parameters()) == values * 10
    assert loss.predict(torch.randn(2, *shape)).shape == (2, 10)


def test_gradients_equal_the_hand_written_loss():
    torch.manual_seed(0)
    loss = build_local_loss("linear", UnitShape((512, 4, 4)), NETWORK).double()
    features = torch.randn(3, 512, 4, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 9, 0])
    loss(features, labels).loss.backward()
    latents = features.detach().unflatten(3, (2, 2)).unflatten(2, (2, 2)).mean((3, 5)).flatten(1)
    error = (latents @ loss.linear.weight.T).softmax(1) - F.one_hot(labels, 10)
    torch.testing.assert_close(loss.linear.weight.grad, (error.T @ latents / 3).detach(), rtol=1e-12, atol=1e-12)
    pooled = (error @ loss.linear.weight / 3).detach().view(3, 512, 2, 2) / 4
    spread = pooled.repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(features.grad, spread, rtol=1e-12, atol=1e-12)
