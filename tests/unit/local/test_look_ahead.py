"""Auxiliary networks shaped like the layers to come."""

import pytest
import torch
from torch import nn

from snugfit._chain import Chain
from snugfit._models import build
from snugfit.errors import UsageError
from snugfit.local import NetworkStats, UnitShape, build_local_loss
from snugfit.local.assignment import Layout, layer_shape
from snugfit.local.base import ConvShape, LayerShape
from snugfit.local.look_ahead import MirroredLayer, auxiliary_depth, reduction, sampled_layers


def layers(count):
    return [LayerShape((ConvShape(8 + index, (3, 3)),), (8, 8)) for index in range(count)]


def chain_of(name, size=32):
    with torch.device("meta"):
        return Chain.from_module(build(name, 10, size), (3, size, size), name)


def test_layers_are_sampled_equally_spaced_up_to_the_last():
    filters = [[layer.convs[0].filters - 8 for layer in sampled_layers(layers(10), depth)] for depth in (1, 2, 5, 10)]
    assert filters == [[9], [4, 9], [1, 3, 5, 7, 9], list(range(10))]
    assert sampled_layers(layers(2), 5) == layers(2)


def test_depth_decreases_linearly_towards_the_output():
    """ResNet-32 with depth 5 in the authors' code: 16 - 5 modules, tau of 0.5."""
    assert [auxiliary_depth(5, position, 10) for position in range(10)] == [5, 5, 5, 4, 4, 4, 4, 3, 3, 3]
    assert [auxiliary_depth(1, position, 7) for position in range(7)] == [1] * 7
    assert auxiliary_depth(3, 0, 1) == 3
    assert [auxiliary_depth(depth, 14, 15) for depth in range(1, 7)] == [1, 2, 2, 2, 3, 4]


def test_layers_are_those_of_the_network_without_shortcuts():
    resnet = [layer_shape(unit) for unit in chain_of("resnet18").units]
    assert resnet[0] == LayerShape((ConvShape(64, (3, 3)),), (32, 32))
    assert resnet[3] == LayerShape((ConvShape(128, (3, 3)), ConvShape(128, (3, 3))), (16, 16), residual=True)
    inverted = layer_shape(next(unit for unit in chain_of("mobilenet_v2", 64).units if len(unit.convs) == 3))
    assert [conv.depthwise for conv in inverted.convs] == [False, True, False]
    assert [conv.kernel for conv in inverted.convs] == [(1, 1), (3, 3), (1, 1)]
    assert layer_shape(chain_of("vgg16").units[1]).size == (16, 16)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2", "vgg11", "smallconv"])
def test_every_unit_of_our_models_gets_a_network_that_halves_as_the_layers_to_come_do(name):
    layout = Layout.of(chain_of(name), "auglocal:depth=3", 10)
    for index, unit in enumerate(layout.chain.units[:-1]):
        loss = layout.make_loss(index).to_empty(device="cpu")
        mirrored = [each for each in loss.layers if isinstance(each, MirroredLayer)]
        later = layout.unit_shape(index).later
        depth = auxiliary_depth(3, index, len(layout) - 1)
        assert len(mirrored) == (0 if len(unit.output_shape) == 1 else min(depth, len(later)))
        features = torch.randn(2, *unit.output_shape)
        assert loss.predict(features).shape == (2, 10)
        if mirrored:
            for each in loss.layers[: len(mirrored)]:
                features = each(features)
                assert tuple(features.shape[2:]) == each.size
            assert each.size == later[-1].size


def test_a_depthwise_layer_keeps_its_input_width_and_stays_depthwise():
    layer = LayerShape((ConvShape(96, (1, 1)), ConvShape(96, (3, 3), True), ConvShape(24, (1, 1))), (4, 4), True)
    mirrored = MirroredLayer(16, (8, 8), layer)
    convs = [each for each in mirrored.main if isinstance(each, nn.Conv2d)]
    assert [(conv.in_channels, conv.out_channels, conv.groups, conv.stride) for conv in convs] == [
        (16, 96, 1, (1, 1)),
        (96, 96, 96, (2, 2)),
        (96, 24, 1, (1, 1)),
    ]
    assert mirrored(torch.randn(2, 16, 8, 8)).shape == (2, 24, 4, 4)


@pytest.mark.parametrize(
    ("ratio", "kernel", "pool", "stride"),
    [(1, 3, 1, 1), (2, 3, 1, 2), (3, 3, 1, 3), (4, 3, 2, 2), (16, 3, 8, 2), (4, 1, 4, 1), (4, 5, 1, 4), (1, 1, 1, 1)],
)
def test_maps_are_pooled_where_a_stride_would_leave_pixels_out(ratio, kernel, pool, stride):
    assert reduction(ratio, kernel) == (pool, stride)


@pytest.mark.parametrize("residual", [False, True])
def test_every_pixel_of_a_large_map_counts(residual):
    layer = LayerShape((ConvShape(8, (3, 3)),), (2, 2), residual)
    mirrored, x = MirroredLayer(4, (32, 32), layer).eval(), torch.randn(1, 4, 32, 32, requires_grad=True)
    mirrored.main(mirrored.pool(x)).sum().backward()
    assert (x.grad != 0).all() and mirrored(x).shape == (1, 8, 2, 2)


def test_the_gradient_that_a_residual_path_returns_is_not_overwritten():
    plain, residual = layers(1)[0], LayerShape((ConvShape(8, (3, 3)), ConvShape(8, (3, 3))), (8, 8), residual=True)
    network = NetworkStats(8, 8, 4)
    gives_up = [
        build_local_loss("auglocal", UnitShape((8, 8, 8), later=(layer,)), network).gives_up_gradient
        for layer in (plain, residual)
    ]
    assert gives_up == [True, False]


def test_a_depth_of_nothing_is_refused():
    with pytest.raises(UsageError, match="depth=0 must be at least 1"):
        build_local_loss("auglocal:depth=0", UnitShape((8, 8, 8)), NetworkStats(8, 8, 4))
