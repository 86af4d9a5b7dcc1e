"""Table 3 of LLS from the general counter: VGG8's rows, and MobileNetV1's beside them."""

import functools
import math

import pytest
import torch

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.local import learning_signal
from snugfit.local.macs import input_gradient_macs

PROJECTIONS = ("linear", "lls", "lls-m", "lls-mxm")
TABLE_3 = [  # classes, image size; millions of MACs; additional parameters
    (10, 32, (2.56, 2.46, 2.46, 2.46), (102_400, 0, 70, 700)),
    (10, 128, (36.48, 36.38, 36.38, 36.38), (102_400, 0, 70, 700)),
    (100, 32, (5.33, 4.30, 4.31, 4.51), (1_024_000, 0, 700, 70_000)),
    (200, 64, (15.18, 13.13, 13.14, 13.97), (2_048_000, 0, 1400, 280_000)),
]


@functools.cache
def chain_of(name, classes, size):
    with torch.device("meta"):
        return Chain.from_module(models.build(name, classes, size), (3, size, size), name)


@functools.cache
def projections(name, classes, size):
    return learning_signal(chain_of(name, classes, size), classes, PROJECTIONS)


def truncated(macs):
    """Millions with two decimals, cut off as the paper does: its 2.56 is 2.568192."""
    return math.floor(macs / 10_000) / 100


@pytest.mark.parametrize(("classes", "size", "macs", "parameters"), TABLE_3, ids=str)
def test_vgg8_as_in_table_3(classes, size, macs, parameters):
    signals = projections("vgg8", classes, size)
    assert tuple(truncated(signals[name].macs) for name in PROJECTIONS) == macs
    assert tuple(signals[name].additional_parameters for name in PROJECTIONS) == parameters


@pytest.mark.parametrize(("classes", "size", "macs"), [(10, 32, 719.33), (200, 64, 2871.20)])
def test_backpropagation_through_vgg8_as_in_table_3(classes, size, macs):
    backprop = projections("vgg8", classes, size)["backprop"]
    assert (truncated(backprop.macs), backprop.additional_parameters) == (macs, 0)


def test_where_table_3_differs_from_its_own_rule():
    """Imagenette's figure is that of 100 classes; CIFAR-100's, 719.40, is 0.02 below the rule that gives the others."""
    assert truncated(projections("vgg8", 10, 128)["backprop"].macs) == 11477.72
    assert truncated(input_gradient_macs(chain_of("vgg8", 100, 128).to_module(), (3, 128, 128))) == 11477.81
    assert truncated(projections("vgg8", 100, 32)["backprop"].macs) == 719.42


def test_depthwise_blocks_of_mobilenet_count_their_pointwise_convolutions():
    """The paper has 178.23 and 178.28 for a rule that it does not give, and 181.83 for a head behind a 1x1 pool."""
    chain, signals = chain_of("mobilenet_v1", 2, 128), projections("mobilenet_v1", 2, 128)
    pointwise = sum(
        conv.in_channels * conv.out_channels * math.prod(conv.output_size)
        for unit in chain.units for conv in unit.convs if conv.kernel == (1, 1)
    )  # fmt: skip
    elements = sum(math.prod(unit.map_shape) for unit in chain.units)
    assert signals["lls"].macs == pointwise + 4 * elements + 2 * 2 * 23_552
    assert [truncated(signals[name].macs) for name in ("backprop", *PROJECTIONS)] == [
        181.84, 180.36, 180.31, 180.31, 180.31,
    ]  # fmt: skip
    assert truncated(signals["backprop"].macs - 2 * (4 - 1) * 1024) == 181.83
