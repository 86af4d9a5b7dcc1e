"""The experiment with low-rank projections of what convolutions keep, against float64."""

from __future__ import annotations

import pytest
import torch
from benchmarks import kept_maps
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize(("stride", "padding", "kernel"), [(1, 1, 3), (2, 1, 3), (2, 0, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_gradients_differ_by_the_discarded_part_alone(seed: int, stride: int, padding: int, kernel: int) -> None:
    torch.manual_seed(seed)
    inputs = torch.randn(3, 8, 6, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 8, kernel, kernel, dtype=torch.float64, requires_grad=True)
    basis = torch.linalg.qr(torch.randn(8, 2, dtype=torch.float64)).Q
    output = kept_maps.ProjectedConvolution.apply(inputs, weight, basis, (stride, padding, 1))
    exact = F.conv2d(inputs, weight, None, stride, padding)
    assert torch.equal(output, exact)
    upper = torch.randn_like(exact)
    found = torch.autograd.grad(output, (inputs, weight), upper)
    wanted = torch.autograd.grad(exact, (inputs, weight), upper)
    torch.testing.assert_close(found[0], wanted[0])
    discarded = inputs.detach() - torch.einsum("cr,dr,bdhw->bchw", basis, basis, inputs.detach())
    error = torch.nn.grad.conv2d_weight(discarded, list(weight.shape), upper, stride, padding)
    torch.testing.assert_close(wanted[1] - found[1], error)
    assert ((wanted[1] - found[1]).norm(dim=(0, 1)) <= discarded.norm() * upper.norm()).all()


def test_the_basis_finds_the_channels_of_inputs_of_low_rank() -> None:
    torch.manual_seed(0)
    inputs = torch.einsum("cr,brhw->bchw", torch.randn(8, 2), torch.randn(3, 2, 6, 6)).requires_grad_()
    layer = nn.Sequential(kept_maps.LeanConv2d(8, 5, 3, bias=False))
    kept_maps.project(layer, 4)
    layer(inputs).square().sum().backward()
    found, exact = layer[0].weight.grad.clone(), F.conv2d(inputs, layer[0].weight).square().sum()
    torch.testing.assert_close(found, torch.autograd.grad(exact, layer[0].weight)[0], rtol=1e-3, atol=1e-2)
