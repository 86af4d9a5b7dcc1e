"""The papers' networks: sizes, names, and building without memory."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from snugfit._models import build, names
from snugfit.errors import UnknownNameError


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vgg16", 14_728_266),
        ("vgg19", 20_040_522),
        ("resnet18", 11_000_138),
        ("resnet18_projection", 11_173_962),
        ("resnet20", 269_722),
    ],
)
def test_parameter_counts_for_ten_classes(name, parameters):
    with torch.device("meta"):
        assert count(build(name, 10, 32)) == parameters


def test_resnet20_has_nine_blocks_on_feature_maps_of_32_16_and_8_pixels():
    """He et al., section 4.2: 3 blocks with 16, 32 and 64 filters each; the stem and 18 convolutions, then the head."""
    sizes = []
    with torch.device("meta"):
        model = build("resnet20", 10, 32)
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_hook(lambda layer, inputs, output: sizes.append(tuple(output.shape[1:])))
        model(torch.empty(1, 3, 32, 32))
    assert sizes == [(16, 32, 32)] * 7 + [(32, 16, 16)] * 6 + [(64, 8, 8)] * 6


def test_mobilenet_v2_has_torchvisions_size_names_and_shapes():
    with torch.device("meta"):
        model = build("mobilenet_v2", 1000, 224)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert count(model) == 3_504_872
    assert len(shapes) == 314
    assert shapes["features.0.0.weight"] == (32, 3, 3, 3)
    assert shapes["features.1.conv.0.0.weight"] == (32, 1, 3, 3)
    assert shapes["features.1.conv.1.weight"] == (16, 32, 1, 1)
    assert shapes["features.2.conv.1.0.weight"] == (96, 1, 3, 3)
    assert shapes["features.17.conv.3.running_var"] == (320,)
    assert shapes["features.18.0.weight"] == (1280, 320, 1, 1)
    assert shapes["classifier.1.weight"] == (1000, 1280)
    assert model.classifier[0].p == 0.2


@pytest.mark.data
def test_published_mobilenet_v2_weights_fit():
    file = Path(os.environ["SNUGFIT_DATA"]) / "weights" / "mobilenet_v2_imagenet_onnxzoo7_trunk.safetensors"
    with torch.device("meta"):
        own = {k: tuple(v.shape) for k, v in build("mobilenet_v2", 10, 224).state_dict().items()}
    with safe_open(file, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            assert own[name] == tuple(weights.get_slice(name).get_shape())


def test_vgg8_needs_the_macs_of_table_3():
    """Backpropagation's 719.33 million MACs on CIFAR-10 are the forward MACs of layers 2 to L."""
    with torch.device("meta"):
        model, macs = build("vgg8", 10, 32).eval(), []

        def note(layer, inputs, output):
            macs.append(layer.weight.numel() * (output[0, 0].numel() if output.dim() == 4 else 1))

        for layer in model.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.register_forward_hook(note)
        model(torch.empty(1, 3, 32, 32))
    assert len(macs) == 8
    assert sum(macs[1:]) / 1e6 == pytest.approx(719.33, abs=0.01)


@pytest.mark.parametrize("name", [name for name in names() if name != "yolov2_16"])
@pytest.mark.parametrize(("size", "channels"), [(8, 1), (16, 1), (32, 3), (48, 3)])
def test_every_model_builds_on_meta_and_maps_images_to_logits(name, size, channels):
    if name == "vit_b_16" and size % 16:
        pytest.skip("its images divide into patches of 16 pixels")
    with torch.device("meta"):
        model = build(name, 7, size, channels)
        assert all(p.is_meta for p in model.parameters())
        assert model(torch.empty(2, channels, size, size)).shape == (2, 7)


def test_vgg_names_and_pools():
    with torch.device("meta"):
        model = build("vgg16", 10, 32)
    assert {key.split(".")[0] for key in model.state_dict()} == {"features", "classifier"}
    assert "features.0.bias" in model.state_dict()
    assert sum(isinstance(m, nn.MaxPool2d) for m in model.features) == 5


def test_option_a_shortcut_subsamples_and_pads_with_zeros():
    model = build("resnet18", 10, 8).eval()
    x = torch.randn(2, 64, 4, 4)
    y = model.layer2[0].shortcut(x)
    assert y.shape == (2, 128, 2, 2)
    assert torch.equal(y[:, 32:96], x[:, :, ::2, ::2])
    assert not y[:, :32].any()
    assert not y[:, 96:].any()
    assert not list(model.layer2[0].shortcut.parameters())


def test_unknown_name_offers_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'vgg16'"):
        build("vgg-16", 10, 32)
