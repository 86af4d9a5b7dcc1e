"""The auxiliary network against a hand-written functional version, and NeuroFlux's rule for its width."""

import pytest
import torch
from torch.nn import functional as F

from snugfit.local import CLASSIC_FILTERS, NetworkStats, UnitShape, aan_filters, build_local_loss, is_initial

VGG = NetworkStats(narrowest=64, widest=512, classes=10)


def hand_written_loss(features, labels, conv, gamma, beta, weight, bias):
    """Conv 3x3, batch norm, ReLU, 2x2 average pool, linear, cross entropy, in plain arithmetic."""
    maps = F.conv2d(features, conv, padding=1)
    mean = maps.mean((0, 2, 3), keepdim=True)
    variance = ((maps - mean) ** 2).mean((0, 2, 3), keepdim=True)
    maps = (maps - mean) / (variance + 1e-5).sqrt() * gamma.view(1, -1, 1, 1) + beta.view(1, -1, 1, 1)
    maps = maps * (maps > 0)
    batch, filters, height, width = maps.shape
    pooled = maps.view(batch, filters, 2, height // 2, 2, width // 2).mean((3, 5))
    logits = pooled.flatten(1) @ weight.T + bias
    return -(logits - logits.logsumexp(1, keepdim=True))[torch.arange(batch), labels].mean()


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_equal_the_hand_written_network(channels_last):
    torch.manual_seed(0)
    network = NetworkStats(narrowest=6, widest=8, classes=5)
    loss_module = build_local_loss("aan", UnitShape((3, 8, 6), initial=True), network).double()
    with torch.no_grad():
        for parameter in loss_module.parameters():
            parameter.normal_()
    features, labels = torch.randn(4, 3, 8, 6, dtype=torch.float64), torch.tensor([0, 4, 2, 2])
    if channels_last:
        features = features.to(memory_format=torch.channels_last)
    names = ["conv.weight", "norm.weight", "norm.bias", "linear.weight", "linear.bias"]
    parameters = [loss_module.get_parameter(f"layers.{name}") for name in names]
    assert len(parameters) == len(list(loss_module.parameters()))

    mine = [features.clone().requires_grad_(), *parameters]
    loss = loss_module(mine[0], labels).loss
    theirs = [tensor.detach().clone().requires_grad_() for tensor in mine]
    expected = hand_written_loss(theirs[0], labels, *theirs[1:])

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for got, want in zip(torch.autograd.grad(loss, mine), torch.autograd.grad(expected, theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_parameter_counts_by_hand():
    aan = build_local_loss("aan", UnitShape((64, 32, 32), initial=True), VGG)
    assert sum(p.numel() for p in aan.parameters()) == 64 * 32 * 9 + 2 * 32 + 32 * 4 * 10 + 10
    classic = build_local_loss("classic", UnitShape((64, 32, 32), initial=True), VGG)
    assert sum(p.numel() for p in classic.parameters()) == 64 * 256 * 9 + 2 * 256 + 256 * 4 * 10 + 10
    flat = build_local_loss("classic", UnitShape((512,)), VGG)
    assert sum(p.numel() for p in flat.parameters()) == 512 * 10 + 10
    assert (aan.filters, classic.filters, flat.filters) == (32, CLASSIC_FILTERS, 0)


@pytest.mark.parametrize(("shape", "batch"), [((8, 8, 8), 3), ((8, 7, 5), 2), ((8, 1, 1), 2), ((8,), 3)])
@pytest.mark.parametrize("name", ["aan", "classic"])
def test_shapes(name, shape, batch):
    loss_module = build_local_loss(name, UnitShape(shape), NetworkStats(4, 8, 3))
    output = loss_module(torch.randn(batch, *shape), torch.zeros(batch, dtype=torch.int64))
    assert output.loss.shape == () and output.logits.shape == (batch, 3)
    loss_module.eval()
    features = torch.randn(batch, *shape)
    assert torch.equal(loss_module.predict(features), loss_module(features, torch.zeros(batch).long()).logits)


def test_initial_units_of_vgg_and_resnet():
    vgg16_convs = [32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2]
    assert initial_flags(vgg16_convs) == [True, True] + [False] * 11
    resnet18_blocks = [32, 32, 32, 16, 16, 8, 8, 4, 4]
    assert initial_flags(resnet18_blocks) == [True] * 3 + [False] * 6
    imagenet_resnet = [112, 56, 56]
    assert initial_flags(imagenet_resnet, side=224) == [False, False, False]


def initial_flags(sides, side=32):
    return [is_initial((side, side), [(s, s) for s in sides[: i + 1]]) for i in range(len(sides))]


def test_unpadded_convs_do_not_downsample_and_odd_strides_do():
    assert is_initial((28, 28), [(26, 26), (24, 24)])
    assert not is_initial((33, 33), [(17, 17)])
    assert not is_initial((32, 32), [(32, 16)])
    assert not is_initial((32, 32), [(16, 16), (32, 32)])
    assert is_initial((1, 64), [(1, 64)])


def test_filters_follow_the_papers_example():
    assert aan_filters(True, 64, 512) == 32
    assert aan_filters(False, 64, 512) == 256
    assert aan_filters(True, 1, 1) == 1
    widths = [64, 64, 128, 128, 256, 512]
    assert NetworkStats.from_widths(widths, classes=10) == VGG
