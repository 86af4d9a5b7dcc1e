"""Chains from traced models: where they are cut, and that they compute what the model does."""

import pytest
import torch
from chain_zoo import SHAPE, ZOO, assert_chain_is_model
from torch import nn

from snugfit._chain import Chain, ConvFact, initialise_by_reset
from snugfit._models import build, names


def unit_names(model, shape=SHAPE):
    return [unit.name for unit in Chain.from_module(model, shape).all_units]


def meta_chain(name, size=32):
    with torch.device("meta"):
        return Chain.from_module(build(name, 10, size), (3, size, size), name)


@pytest.mark.parametrize("name", ZOO)
def test_chain_equals_its_model(name):
    torch.manual_seed(0)
    assert_chain_is_model(ZOO[name]())


@pytest.mark.parametrize("name", [name for name in names() if name not in ("vgg16_imagenet", "vit_b_16")])
def test_chain_equals_our_models(name):
    torch.manual_seed(0)
    assert_chain_is_model(build(name, 10, 16), gradients=False)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121", "vgg16_bn", "swin_t"])
def test_chain_equals_torchvisions_models(name):
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    chain = assert_chain_is_model(models.get_model(name, weights=None, num_classes=5), (3, 64, 64), 2, gradients=False)
    assert len(chain.units) >= 8


def test_units_of_vgg16():
    chain = meta_chain("vgg16")
    convs = [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40]
    assert [unit.name for unit in chain.units] == [f"features.{i}" for i in convs]
    assert chain.head.name == "classifier"
    assert [unit.output_shape[-1] for unit in chain.units] == [32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2, 1]
    assert chain.parameters == 14_728_266
    assert list(chain.units[0].module.state_dict())[:2] == ["features.0.weight", "features.0.bias"]
    assert chain.units[0].parameters == 64 * 27 + 64 + 128
    assert chain.units[0].weight_bytes == 4 * (64 * 27 + 64 + 4 * 64) + 8


def test_units_of_resnet18():
    chain = meta_chain("resnet18")
    blocks = [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert [unit.name for unit in chain.all_units] == ["conv1", *blocks, "fc"]
    assert chain.head.input_shape == (512, 4, 4)


def test_units_of_mobilenet_v2():
    chain = meta_chain("mobilenet_v2")
    assert [unit.name for unit in chain.all_units] == [*(f"features.{i}" for i in range(19)), "classifier"]
    assert chain.head.input_shape == (1280, 1, 1)


def test_units_of_resnet50():
    blocks = [f"layer{stage}.{block}" for stage, count in enumerate((3, 4, 6, 3), start=1) for block in range(count)]
    chain = meta_chain("resnet50", 64)
    assert [unit.name for unit in chain.all_units] == ["conv1", *blocks, "fc"]
    assert chain.units[0].output_shape == (64, 16, 16) and chain.head.input_shape == (2048, 2, 2)


def test_units_of_vgg16_for_imagenet():
    chain = meta_chain("vgg16_imagenet", 224)
    assert [unit.name for unit in chain.units][12:] == ["features.28", "classifier.0", "classifier.3"]
    assert chain.units[12].output_shape == (512, 7, 7)


def test_conv_facts():
    unit = meta_chain("mobilenet_v2").units[2]
    assert unit.convs == (
        ConvFact("features.2.conv.0.0", 16, 96, (1, 1), (1, 1), 1, (16, 16), (16, 16)),
        ConvFact("features.2.conv.1.0", 96, 96, (3, 3), (2, 2), 96, (16, 16), (8, 8)),
        ConvFact("features.2.conv.2", 96, 24, (1, 1), (1, 1), 1, (8, 8), (8, 8)),
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bottlenecks", ["conv1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]),
        (
            "dense",
            ["features.conv0", "features.denseblock1", "features.transition1", "features.denseblock2", "classifier"],
        ),
        ("mbconv", ["features.0", "features.1.0", "features.1.1", "features.2", "classifier"]),
        ("preactivation", ["conv1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "linear"]),
        ("batch size", ["conv1", "conv2", "fc"]),
        ("constants", ["conv1", "conv2", "fc"]),
    ],
)
def test_units_of_the_zoo(name, expected):
    assert unit_names(ZOO[name]()) == expected


def test_global_pooling_belongs_to_what_follows_and_other_pools_to_what_precedes():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(),
        nn.Conv2d(4, 4, 3), nn.MaxPool2d(5), nn.AvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5), nn.Softmax(1),
    )  # fmt: skip
    chain = Chain.from_module(model, SHAPE)
    assert [unit.output_shape for unit in chain.all_units] == [(4, 7, 7), (4, 1, 1), (8,), (5,)]
    assert [type(m).__name__ for m in chain.units[0].module.children()] == ["Conv2d", "ReLU", "MaxPool2d", "Dropout"]
    assert [type(m).__name__ for m in chain.units[2].module.children()] == ["AvgPool2d", "Flatten", "Linear", "ReLU"]
    assert [type(m).__name__ for m in chain.head.module.children()] == ["Linear", "Softmax"]


def test_convolutional_classifier_is_the_head():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(), nn.Conv2d(4, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    chain = Chain.from_module(model, SHAPE)
    assert chain.units[0].output_shape == (4, 14, 14)
    assert chain.head.output_shape == (5,)


def test_a_depthwise_separable_network_without_blocks_is_still_cut():
    model = nn.Sequential()
    model.add_module("net", SeparableStack())
    model.add_module("fc", nn.Linear(8, 5))
    assert len(unit_names(model)) == 12


class SeparableStack(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, padding=1)]
        for _ in range(5):
            layers += [nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).mean((2, 3))


def test_only_units_that_would_change_their_input_copy_it():
    def copying(model):
        units = Chain.from_module(model, SHAPE).all_units
        return [unit.name for unit in units if any(node.target == "clone" for node in unit.module.graph.nodes)]

    assert copying(ZOO["in place"]()) == ["conv2", "fc1"]
    assert copying(ZOO["bottlenecks"]()) == []
    assert copying(ZOO["dense"]()) == []


def test_parameters_are_shared_and_weights_load_back():
    model = ZOO["bottlenecks"]()
    chain = Chain.from_module(model, SHAPE)
    plain = chain.to_module()
    own = dict(model.named_parameters())
    assert all(parameter is own[name] for name, parameter in plain.named_parameters())
    fresh = ZOO["bottlenecks"]()
    fresh.load_state_dict(plain.state_dict())
    x = torch.randn(2, *SHAPE)
    assert torch.equal(fresh.eval()(x), model.eval()(x))


def test_tracing_leaves_the_model_as_it_was():
    model = ZOO["mbconv"]()
    model.eval()
    model.features[1].train()
    modes = {name: module.training for name, module in model.named_modules()}
    keys, state = set(model.__dict__), {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.get_rng_state()
    Chain.from_module(model, SHAPE)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(type(module.training) is bool for module in model.modules())
    assert set(model.__dict__) == keys
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_network_in_double_precision_can_be_a_chain():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(Chain.from_module(model, (3, 8, 8))(images), model(images))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "vgg11"])
def test_merged_units_compute_what_their_units_do_and_share_their_weights(name):
    chain = meta_chain(name)
    count = len(chain.units)
    merged = chain.merged([count - 3, 1, 2])
    assert [len(merged.units), merged.units[1], merged.head] == [3, chain.units[count - 3], chain.head]
    assert merged.units[0].name == f"{chain.units[0].name}..{chain.units[count - 4].name}"
    assert [unit.output_shape for unit in merged.units] == [chain.units[i].output_shape for i in (-4, -3, -1)]
    assert merged.units[2].map_shape == chain.units[-1].map_shape
    for unit in chain.all_units:
        initialise_by_reset(unit, seed=1)
    assert merged.to_module().state_dict().keys() == chain.to_module().state_dict().keys()
    images = torch.randn(2, 3, 32, 32)
    for mode in (chain, merged):
        for unit in mode.all_units:
            unit.module.eval()
    assert torch.equal(merged(images), chain(images))


@pytest.mark.parametrize("sizes", [[], [1, 1], [0, 8], [99]])
def test_merging_must_take_every_unit_once(sizes):
    with pytest.raises(ValueError, match="do not divide 8 units"):
        meta_chain("vgg11").merged(sizes)


class Optional(nn.Module):
    """Takes a flag and a number that have defaults."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, images, flip=False, scale=2.0):
        images = images.flip(2) if flip else images
        return self.head((self.layers(images) * scale).mean((2, 3)))


def test_flags_and_numbers_of_a_forward_pass_keep_their_defaults():
    model, images = Optional(), torch.randn(2, 3, 8, 8)
    chain = Chain.from_module(model, (3, 8, 8))
    assert len(chain.units) > 1
    assert torch.equal(chain.to_module()(images), model(images))
