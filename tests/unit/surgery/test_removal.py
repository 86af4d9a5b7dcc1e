"""Chosen channels are removed: the network is then the one in which they are zero, for every family."""

import copy

import pytest
import torch
from surgery_zoo import NETWORKS, SHAPE, images, kill, traced
from torch import nn
from torch.nn import functional as F

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit.errors import ModelError, UnknownNameError, UsageError
from snugfit.surgery import apply_cut, find_groups, prune_optimizer, remove_channels, width


class Basic(nn.Module):
    """CIFAR's residual block, with the shortcut without parameters (He et al., option A)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.more, self.stride = outputs - inputs, stride

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(x + y)


class ResNet56(nn.Module):
    def __init__(self, depth=9):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.layers = nn.Sequential(
            *(nn.Sequential(Basic(a, b, s), *(Basic(b, b, 1) for _ in range(depth - 1))) for a, b, s in widths)
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        return self.linear(self.layers(F.relu(self.bn1(self.conv1(x)))).mean((2, 3)))


FAMILIES = [*(name for name in models.names() if name != "vit_b_16"), "resnet56"]  # that one has no maps of channels


def network(name, dtype):
    """A network of the library with groups, random weights, and statistics as training would leave them."""
    torch.manual_seed(0)
    model = ResNet56() if name == "resnet56" else models.build(name, 10, 32)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
            nn.init.normal_(layer.running_mean, std=0.2)
            nn.init.normal_(layer.bias, std=0.2)
    module, groups = traced(model, (3, 32, 32)) if dtype is torch.float64 else single(model)
    return module.eval(), groups


def single(model):
    module = Chain.from_module(model, (3, 32, 32)).to_module()
    return module, find_groups(module, (3, 32, 32))


CASES = [
    pytest.param(name, dtype, marks=[pytest.mark.slow] if (name, dtype) == ("vgg16_imagenet", torch.float64) else [])
    for name in FAMILIES
    for dtype in (torch.float64, torch.float32)
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@torch.no_grad()
def test_every_family_without_channels_is_the_one_with_those_channels_at_zero(name, dtype):
    module, groups = network(name, dtype)
    assert groups
    x = images(2, (3, 32, 32)).to(dtype)
    whole = module(x)
    kept = {group.name: torch.randperm(width(module, group))[: max(1, width(module, group) // 2)] for group in groups}
    for group in groups:
        gone = set(range(width(module, group))) - set(kept[group.name].tolist())
        kill(module, group.producers, sorted(gone))
    zeroed = module(x)
    remove_channels(module, groups, kept)
    assert all(width(module, group) == len(kept[group.name]) for group in groups)
    pruned = module(x)
    scale = max(1.0, float(zeroed.abs().max()))
    assert (pruned - zeroed).abs().max() <= 1e-6 * scale
    assert (whole - zeroed).abs().max() > 1e-3 * scale, "the channels that were removed must matter"


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, 1e-2), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
def test_the_optimizer_goes_on_with_what_it_knows_of_the_channels_that_stay(make):
    module, groups = traced(NETWORKS["mobilenet"]())
    optimizer = make(module.parameters())
    labels = torch.tensor([0, 1, 2, 3])
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(module(images()), labels).backward()
        optimizer.step()
    before = copy.deepcopy({name: dict(optimizer.state[p]) for name, p in module.named_parameters()})
    cuts = remove_channels(module, groups, {groups[0].name: [0, 2, 5], groups[1].name: [8, 1]})
    prune_optimizer(optimizer, module, cuts)
    assert cuts
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            expected = before[name][key]
            same_shape = torch.is_tensor(expected) and expected.dim()
            expected = apply_cut(expected, cuts[name]) if name in cuts and same_shape else expected
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected))
    F.cross_entropy(module(images()), labels).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("kept", "error", "says"),
    [
        ({"0.0": []}, ModelError, "no channel of layer 0.0 would be left of 6"),
        ({"0.0": [0, 6]}, UsageError, "different numbers from 0 to 5"),
        ({"0.0": [-1]}, UsageError, "different numbers from 0 to 5"),
        ({"0.0": [1, 1]}, UsageError, "different numbers from 0 to 5"),
        ({"2.0": [1], "0.1": [1]}, UnknownNameError, "0.1"),
    ],
)
def test_what_cannot_be_removed_is_refused_and_nothing_changes(kept, error, says):
    module, groups = traced(NETWORKS["plain"]())
    before = {name: tensor.shape for name, tensor in module.state_dict().items()}
    with pytest.raises(error, match=says):
        remove_channels(module, groups, kept)
    assert {name: tensor.shape for name, tensor in module.state_dict().items()} == before


def test_keeping_all_channels_changes_nothing():
    module, groups = traced(NETWORKS["plain"]())
    assert remove_channels(module, groups, {"0.0": range(6)}) == {}


def test_a_network_on_the_meta_device_is_cut_too():
    module, _ = traced(NETWORKS["mobilenet"]())
    module.to("meta")
    groups = find_groups(module, SHAPE)
    remove_channels(module, groups, {groups[1].name: [3, 4]})
    assert width(module, groups[1]) == 2 and module(
        torch.empty(1, *SHAPE, dtype=torch.float64, device="meta")
    ).shape == (1, 5)
