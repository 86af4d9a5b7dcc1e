"""Side networks beside frozen backbones: the paper's positions and sizes, the sums, and images that are too small."""

import pytest
import torch
from surgery_zoo import MobileNet, Residual, ResNet, VisionTransformer, conv_norm
from torch import nn
from torch.nn import functional as F

from snugfit import _models as models
from snugfit._chain import Chain, find_blocks
from snugfit.errors import ModelError
from snugfit.lean import use_lean
from snugfit.memory.tensors import LiveBytes
from snugfit.surgery import attach_side_network, side_positions
from snugfit.surgery.sidenet import ZeroScaledBatchNorm2d


def traced(model, side, channels=3):
    return Chain.from_module(model, (channels, side, side)).to_module()


def built(name, side):
    with torch.device("meta"):
        model = models.build(name, 10, side)
    return traced(model, side)


def side_layers(module, position):
    return dict(module.get_submodule(f"side.{position}").named_children())


def test_the_papers_positions_and_parameters():
    backbone = built("mobilenet_v2", 224)
    assert side_positions(backbone, (3, 224, 224)) == (2, 4, 7, 11, 14, 17)
    attached = attach_side_network(backbone, (3, 224, 224))
    added = {name: each for name, each in attached.named_parameters() if name.startswith("side.")}
    assert sum(each.numel() for each in added.values()) == 380_072 and all(each.is_meta for each in added.values())
    assert set(attached.state_dict()) - set(backbone.state_dict()) == {
        name for name in attached.state_dict() if name.startswith("side.")
    }
    first, fourth, last = (side_layers(attached, position) for position in (2, 4, 17))
    assert list(first) == ["shrink", "pool", "conv", "norm", "activation", "mix", "scale", "enlarge"]
    assert [(each["conv"].kernel_size[0], each["conv"].groups) for each in (first, fourth, last)] == [
        (5, 1), (5, 2), (3, 2),
    ]  # fmt: skip
    assert "enlarge" not in fourth and last["enlarge"].size == (7, 7)  # a block that halves as the pool does
    assert {first["norm"].eps, first["scale"].eps} == {1e-3}


@pytest.mark.parametrize(
    ("name", "side", "expected"),
    [("resnet50", 224, (1, 4, 8, 14)), ("resnet18", 32, (5, 7)), ("mobilenet_v2", 225, (2, 4, 7, 11, 14, 17))],
)
def test_positions_of_other_networks(name, side, expected):
    assert side_positions(built(name, side), (3, side, side)) == expected


def test_width_is_that_of_the_first_convolution_in_eights():
    attached = attach_side_network(built("mobilenet_v2", 64), (3, 64, 64), width=0.5)
    widths = [side_layers(attached, position)["conv"].out_channels for position in (2, 4, 7, 11, 14, 17)]
    assert widths == [8, 16, 16, 32, 48, 80]


def stirred(module):
    """Side scales and all statistics away from their first values."""
    torch.manual_seed(3)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.running_mean, -0.5, 0.5)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    return module


def side_output(layers, x, shrinks, size):
    """A side module written out by hand."""
    x = F.avg_pool2d(F.avg_pool2d(x, 4), 2) if shrinks else F.avg_pool2d(x, 2)

    def norm(layer, x):
        return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=1e-3)

    def standard(weight):
        spread = weight.flatten(1).std(1).view(-1, 1, 1, 1)
        return (weight - weight.mean((1, 2, 3), keepdim=True)) / (spread + 1e-5)

    conv = layers["conv"]
    x = F.conv2d(x, standard(conv.weight), padding=conv.kernel_size[0] // 2, groups=conv.groups)
    x = F.conv2d(F.relu(norm(layers["norm"], x)), standard(layers["mix"].weight))
    return F.interpolate(norm(layers["scale"], x), size, mode="bilinear", align_corners=False)


class Single(nn.Conv2d):
    """A block of a single node."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 3, 2, 1)


class Late(nn.Module):
    """It overwrites what it is given."""

    def __init__(self):
        super().__init__()
        self.activation, self.conv = nn.ReLU(inplace=True), nn.Conv2d(12, 14, 3, padding=1)

    def forward(self, x):
        return self.conv(self.activation(x))


class Tower(nn.Module):
    """Neighbouring blocks with side modules, one that begins in place, and a layer that is never called."""

    def __init__(self):
        super().__init__()
        self.stem = conv_norm(3, 6, stride=2)
        self.blocks = nn.Sequential(Residual(6, 8, 2), Residual(8, 10), Single(10, 12))
        self.late = Late()
        self.fc, self.unused = nn.Linear(14, 5), nn.Linear(2, 2)

    def forward(self, x):
        return self.fc(self.late(self.blocks(self.stem(x))).mean((2, 3)))


@torch.no_grad()
def test_every_side_output_is_added_to_its_blocks_output():
    model = stirred(Tower()).double().eval()
    backbone = traced(model, 32)
    assert side_positions(backbone, (3, 32, 32)) == (1, 2, 3, 4)
    attached = stirred(attach_side_network(backbone, (3, 32, 32))).eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    sides = [side_layers(attached, position) for position in (1, 2, 3, 4)]
    x = model.stem(images)
    for index, block in enumerate((*model.blocks, model.late)):
        entry, x = x, block(x.clone())
        x = x + side_output(sides[index], entry if index else images, not index, x.shape[2:])
    torch.testing.assert_close(attached(images), model.fc(x.mean((2, 3))), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", [Tower, lambda: models.build("mobilenet_v2", 10, 64)])
def test_at_first_it_computes_what_the_backbone_does_with_the_backbones_parameters(model):
    backbone = stirred(traced(model(), 64)).eval()
    attached = attach_side_network(backbone, (3, 64, 64))
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(attached(images), backbone(images))
    mine = dict(attached.named_parameters())
    assert all(mine[name] is each for name, each in backbone.named_parameters())
    attached.get_submodule("side").train()
    assert torch.equal(attached(images), backbone(images))


def test_weights_go_through_a_state_dict_and_the_network_is_cut_again():
    first, second = (attach_side_network(traced(Tower(), 32), (3, 32, 32)).eval() for _ in range(2))
    stirred(first)
    second.load_state_dict(first.state_dict())
    images = torch.randn(2, 3, 32, 32)
    chain = Chain.from_module(second, (3, 32, 32))
    assert len(chain.units) > 2 and torch.equal(chain(images), first(images))
    assert set(chain.to_module().state_dict()) == set(first.state_dict())


def test_blocks_of_the_attached_network_are_the_backbones():
    backbone = built("mobilenet_v2", 64)
    attached = attach_side_network(backbone, (3, 64, 64))
    for network in (attached, Chain.from_module(attached, (3, 64, 64)).to_module()):
        blocks = find_blocks(network, (3, 64, 64))
        assert [block.output_shape for block in blocks] == [
            block.output_shape for block in find_blocks(backbone, (3, 64, 64))
        ]
        names = [str(node.target) for node in blocks[2].nodes if node.op == "call_module"]
        assert [name for name in names if name.startswith("side.")] == [
            f"side.2.{name}" for name in ("shrink", "pool", "conv", "norm", "activation", "mix", "scale", "enlarge")
        ]
        own = next(index for index, name in enumerate(names) if name.startswith("side."))
        assert own == len(names) - 8  # the block's peak comes before the side module's maps


def test_only_the_side_network_and_the_head_get_gradients_where_only_they_train():
    attached = attach_side_network(traced(MobileNet(), 32), (3, 32, 32))
    trains = {name for name, _ in attached.named_parameters() if name.startswith(("side.", "classifier."))}
    for name, parameter in attached.named_parameters():
        parameter.requires_grad_(name in trains)
    use_lean(attached)
    attached.eval().get_submodule("side").train()
    attached(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert {name for name, parameter in attached.named_parameters() if parameter.grad is not None} == trains


def test_the_blocks_input_is_freed_while_the_block_runs():
    """What a side module reads is pooled while the block's first layer holds it anyway."""
    backbone = built("mobilenet_v2", 224).eval()
    attached = attach_side_network(backbone, (3, 224, 224)).eval()
    block = find_blocks(attached, (3, 224, 224))[4]
    nodes = list(attached.graph.nodes)
    reads = [nodes.index(user) for user in block.entry.users]
    assert max(reads) == nodes.index(block.nodes[0]) + 1
    with LiveBytes() as live, torch.no_grad():
        attached(torch.empty(1, 3, 224, 224, device="meta"))
        whole = live.peak
    with LiveBytes() as live, torch.no_grad():
        backbone(torch.empty(1, 3, 224, 224, device="meta"))
    assert whole - live.peak < 0.02 * live.peak


def test_side_batchnorm_starts_at_zero_whenever_it_is_reset():
    layer = ZeroScaledBatchNorm2d(3)
    nn.init.ones_(layer.weight)
    layer.reset_parameters()
    assert not layer.weight.any() and not layer.bias.any()
    assert ZeroScaledBatchNorm2d(3, affine=False).weight is None


@pytest.mark.parametrize(
    ("name", "side", "least"), [("mobilenet_v2", 32, 33), ("mobilenet_v2", 4, 33), ("resnet18", 4, 9)]
)
def test_images_that_are_too_small(name, side, least):
    backbone = built(name, 64)
    message = f"images of {side}x{side} are too small.*use {least}x{least} or larger"
    for call in (side_positions, attach_side_network):
        with pytest.raises(ModelError, match=message):
            call(backbone, (3, side, side))
    assert side_positions(backbone, (3, least, least))


class Flat(nn.Module):
    """It takes images of 8x4 alone, of which a 4x4 and a 2x2 pool leave nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv_norm(3, 4, stride=2), conv_norm(4, 6, stride=2), nn.Linear(12, 5)

    def forward(self, x):
        return self.c(torch.flatten(self.b(self.a(x)), 1))


def test_images_that_are_too_small_for_a_network_that_takes_no_others():
    backbone = Chain.from_module(Flat(), (3, 8, 4)).to_module()
    with pytest.raises(ModelError, match=r"images of 8x4 are too small.*takes no larger ones"):
        attach_side_network(backbone, (3, 8, 4))


@pytest.mark.parametrize("name", ["transformer", "maps that stay large"])
def test_backbones_without_usable_blocks(name):
    large = nn.Sequential(conv_norm(3, 4, stride=2), conv_norm(4, 5), nn.Flatten(), nn.Linear(180, 3))
    backbone = traced(VisionTransformer() if name == "transformer" else large, 12)
    for call in (side_positions, attach_side_network):
        with pytest.raises(ModelError, match="no block for a side network"):
            call(backbone, (3, 12, 12))


def test_names_and_widths_that_cannot_be():
    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.side, self.net = conv_norm(3, 3), ResNet()

        def forward(self, x):
            return self.net(self.side(x))

    with pytest.raises(ModelError, match="modules named 'side'"):
        attach_side_network(traced(Taken(), 32), (3, 32, 32))
    with pytest.raises(ModelError, match="width 0"):
        attach_side_network(traced(ResNet(), 32), (3, 32, 32), width=0)
