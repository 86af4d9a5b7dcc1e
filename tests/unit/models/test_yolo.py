"""YOLOv2's first 16 layers: what the paper's tables say of them, and that they can be tiled."""

import pytest
import torch
from torch import nn

from snugfit._chain import Chain
from snugfit._models import build
from snugfit.errors import ModelError
from snugfit.tiling import find_tileable_prefix

# darknet's yolov2.cfg: channels and kernel of a convolution, channels alone of a pool; side at 608x608
TABLE = (
    (32, 3, 608), (32, 304), (64, 3, 304), (64, 152), (128, 3, 152), (64, 1, 152), (128, 3, 152), (128, 76),
    (256, 3, 76), (128, 1, 76), (256, 3, 76), (256, 38), (512, 3, 38), (256, 1, 38), (512, 3, 38), (256, 1, 38),
)  # fmt: skip
HEAD = ((512, 3, 38), (5 * 25, 1, 38))


@pytest.fixture(scope="module")
def prefix():
    with torch.device("meta"):
        chain = Chain.from_module(build("yolov2_16", 20, 608), (3, 608, 608))
    return find_tileable_prefix(chain.to_module(), (3, 608, 608))


def test_all_layers_and_the_head_can_be_tiled_and_are_those_of_the_table(prefix):
    found = []
    for layer, size in zip(prefix.layers.layers, prefix.layers.maps[1:], strict=True):
        if layer.macs:
            found.append((size.channels, layer.rows.kernel, size.height))
        elif layer.rows.stride == 2:
            found.append((size.channels, size.height))
    assert tuple(found) == TABLE + HEAD


def test_weights_and_multiply_accumulates_of_the_sixteen_layers():
    """3,418,976 weights and 13.00 billion multiply-accumulates, without norms and head."""
    with torch.device("meta"):
        features = build("yolov2_16", 20, 608).features
    convolutions = [layer for layer in features if isinstance(layer, nn.Conv2d)]
    sides = [each[-1] for each in TABLE if len(each) == 3]
    weights = [layer.weight.numel() for layer in convolutions]
    assert sum(weights) == 3_418_976
    assert sum(each * side**2 for each, side in zip(weights, sides, strict=True)) / 1e9 == pytest.approx(
        13.0, abs=0.005
    )
    assert all(layer.negative_slope == 0.1 for layer in features if isinstance(layer, nn.LeakyReLU))
    assert all(layer.bias is None for layer in convolutions)


@pytest.mark.parametrize(("size", "channels", "classes"), [(16, 1, 1), (64, 3, 7), (416, 3, 80)])
def test_any_multiple_of_16(size, channels, classes):
    with torch.device("meta"):
        model = build("yolov2_16", classes, size, channels)
        assert model(torch.empty(2, channels, size, size)).shape == (2, 5 * (5 + classes), size // 16, size // 16)


def test_other_sizes_are_refused():
    with pytest.raises(ModelError, match="multiple of 16, not 600"):
        build("yolov2_16", 20, 600)


def test_a_chain_of_it_computes_the_same():
    torch.manual_seed(0)
    model = build("yolov2_16", 2, 32).eval()
    chain, images = Chain.from_module(model, (3, 32, 32)), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(chain(images), model(images))
    assert chain.head.output_shape == (35, 2, 2)
    assert set(chain.to_module().state_dict()) == set(model.state_dict())
