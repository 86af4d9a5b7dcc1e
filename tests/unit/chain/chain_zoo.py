"""Small networks built like the usual big ones, and the comparison of a chain with its model."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain


class Bottleneck(nn.Module):
    def __init__(self, width, out, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, stride, 1, bias=False), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or width != out:
            self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class BottleneckNet(nn.Module):
    """As torchvision's resnet50."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(8, 16), Bottleneck(16, 16))
        self.layer2 = nn.Sequential(Bottleneck(16, 32, 2), Bottleneck(32, 32))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(32, 5)

    def forward(self, x):
        x = self.layer2(self.layer1(self.maxpool(self.relu(self.bn1(self.conv1(x))))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class DenseLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, 8, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1, bias=False)

    def forward(self, features):
        x = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        return F.dropout(self.conv2(F.relu(self.norm2(x), inplace=True)), p=0.2, training=self.training)


class DenseBlock(nn.ModuleDict):
    def __init__(self, width):
        super().__init__({f"denselayer{i}": DenseLayer(width + 4 * i) for i in range(2)})

    def forward(self, x):
        features = [x]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    def __init__(self, width, out):
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.conv, self.pool = nn.Conv2d(width, out, 1, bias=False), nn.AvgPool2d(2, 2)


class DenseNet(nn.Module):
    """As torchvision's densenet121."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, 8, 3, padding=1, bias=False))
        self.features.add_module("norm0", nn.BatchNorm2d(8))
        self.features.add_module("relu0", nn.ReLU(inplace=True))
        self.features.add_module("denseblock1", DenseBlock(8))
        self.features.add_module("transition1", Transition(16, 8))
        self.features.add_module("denseblock2", DenseBlock(8))
        self.features.add_module("norm5", nn.BatchNorm2d(16))
        self.classifier = nn.Linear(16, 5)

    def forward(self, x):
        x = F.relu(self.features(x), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class StochasticDepth(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        return x * torch.empty(x.shape[0], 1, 1, 1, device=x.device).bernoulli_(0.5)


class SqueezeExcitation(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x):
        scale = F.silu(self.fc1(F.adaptive_avg_pool2d(x, 1)))
        return x * torch.sigmoid(self.fc2(scale))


class MBConv(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        hidden = width * 2
        self.block = nn.Sequential(
            nn.Sequential(nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU(inplace=True)),
            nn.Sequential(
                nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
                nn.BatchNorm2d(hidden),
                nn.SiLU(inplace=True),
            ),
            SqueezeExcitation(hidden),
            nn.Sequential(nn.Conv2d(hidden, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.residual = stride == 1 and width == out
        self.stochastic_depth = StochasticDepth()

    def forward(self, x):
        y = self.block(x)
        return self.stochastic_depth(y) + x if self.residual else y


class EfficientNet(nn.Module):
    """As torchvision's efficientnet_b0."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True)),
            nn.Sequential(MBConv(8, 12, 2), MBConv(12, 12, 1)),
            nn.Sequential(nn.Conv2d(12, 24, 1, bias=False), nn.BatchNorm2d(24), nn.SiLU(inplace=True)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(24, 5))

    def forward(self, x):
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


class PreActivationBlock(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(out), nn.Conv2d(out, out, 3, padding=1, bias=False)
        if stride != 1 or width != out:
            self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False))

    def forward(self, x):
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv2(F.relu(self.bn2(self.conv1(out))))
        out += shortcut
        return out


class PreActivationNet(nn.Module):
    """As kuangliu's PreActResNet18."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.layer1 = nn.Sequential(PreActivationBlock(8, 8, 1), PreActivationBlock(8, 8, 1))
        self.layer2 = nn.Sequential(PreActivationBlock(8, 16, 2), PreActivationBlock(16, 16, 1))
        self.linear = nn.Linear(16, 5)

    def forward(self, x):
        out = F.avg_pool2d(self.layer2(self.layer1(self.conv1(x))), 8)
        return self.linear(out.view(out.size(0), -1))


class LiveBatchSize(nn.Module):
    """Reads the batch size at the start and uses it at the end; shuffles channels with sizes in between."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 16 * 16, 5)

    def forward(self, x):
        batch = x.shape[0]
        x = F.relu(self.conv1(x))
        b, c, h, w = x.size()
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        x = F.relu(self.conv2(x))
        return self.fc(x.view(batch, -1))


class InPlaceFirst(nn.Module):
    """Units that begin with an in-place operation, one of them on a tensor that is used again, one through a view."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.fc1, self.fc2 = nn.Linear(4 * 16 * 16, 8), nn.Linear(8, 5)
        self.drop, self.last_drop = nn.Dropout(0.3, inplace=True), nn.Dropout(0.3)

    def forward(self, x):
        x = self.conv1(x)
        x = x + self.conv2(self.relu(x))
        x = torch.flatten(x, 1)
        return self.fc2(self.last_drop(self.relu(self.fc1(self.drop(x)))))


class ConstantsAndUnused(nn.Module):
    """Direct parameters, a constant, a buffer out of the state dict, dropout by function, and a layer never called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1))
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.scale = nn.Parameter(torch.full((4, 1, 1), 1.5))
        self.spare = nn.Linear(2, 2)
        self.fc = nn.Linear(4, 5)

    def forward(self, x, mask=None):
        x = (x - self.mean) / self.std + torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        x = F.relu(self.conv1(x) * self.scale)
        x = F.dropout2d(x, 0.25, self.training)
        x = F.relu(self.conv2(x)).mean((2, 3))
        return self.fc(F.dropout(x, training=self.training))


ZOO = {
    "bottlenecks": BottleneckNet,
    "dense": DenseNet,
    "mbconv": EfficientNet,
    "preactivation": PreActivationNet,
    "batch size": LiveBatchSize,
    "in place": InPlaceFirst,
    "constants": ConstantsAndUnused,
}
SHAPE = (3, 16, 16)


def assert_chain_is_model(model: nn.Module, shape=SHAPE, batch=3, gradients=True) -> Chain:
    """A chain computes exactly what its model does, in both modes, with the same gradients and buffers."""
    reference = copy.deepcopy(model)
    chain = Chain.from_module(model, shape)
    assert set(chain.to_module().state_dict()) == set(reference.state_dict())
    torch.manual_seed(3)
    x = torch.randn(batch, *shape)
    for training in (True, False):
        reference.train(training)
        for unit in chain.all_units:
            unit.module.train(training)
        torch.manual_seed(4)
        expected = reference(x.clone())
        torch.manual_seed(4)
        assert torch.equal(run_checking_inputs(chain, x), expected)
        torch.manual_seed(4)
        actual = chain.to_module()(x)
        if gradients and training:
            (expected**2).sum().backward()
            model.zero_grad()
            (actual**2).sum().backward()
            theirs = dict(reference.named_parameters())
            for name, parameter in model.named_parameters():
                both = (parameter.grad, theirs[name].grad)
                assert both == (None, None) or torch.equal(*both), name
        torch.manual_seed(4)
        reference(x.clone())
    ours = chain.to_module().state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(ours[name], tensor), name
    return chain


def run_checking_inputs(chain: Chain, x: torch.Tensor) -> torch.Tensor:
    for unit in chain.all_units:
        before = x.clone()
        y = unit.module(x)
        assert torch.equal(x, before), f"{unit.name} changed its input"
        assert tuple(x.shape[1:]) == unit.input_shape
        assert tuple(y.shape[1:]) == unit.output_shape
        x = y
    return x
