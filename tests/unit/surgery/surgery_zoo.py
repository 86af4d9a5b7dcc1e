"""Small networks whose channels can be followed, and the killing of channels in them."""

import torch
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain
from snugfit._models import build
from snugfit.surgery import find_groups

SIDE = 12
SHAPE = (3, SIDE, SIDE)


def conv_norm(inputs, outputs, kernel=3, stride=1, groups=1, activation=nn.ReLU):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=groups == 1),
        nn.BatchNorm2d(outputs),
        activation(),
    )


def plain():
    return nn.Sequential(
        conv_norm(3, 6),
        nn.MaxPool2d(2),
        conv_norm(6, 8, activation=nn.SiLU),
        nn.Dropout2d(0.1),
        nn.Conv2d(8, 7, 3, padding=1),
        nn.LeakyReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(7, 5),
    )


def vgg_like():
    """Maps of 3 x 3 flattened into the first of two linear layers."""
    return nn.Sequential(
        conv_norm(3, 6, stride=2),
        conv_norm(6, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(5 * 9, 11),
        nn.BatchNorm1d(11),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(11, 5),
    )


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 3, stride, 1, bias=False), nn.BatchNorm2d(6)
        self.conv3, self.bn3 = nn.Conv2d(6, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(out)))))
        out += x if self.downsample is None else self.downsample(x)
        return F.relu(out)


class ResNet(nn.Module):
    """Bottlenecks with and without a projection."""

    def __init__(self):
        super().__init__()
        self.stem = conv_norm(3, 8)
        self.blocks = nn.Sequential(Residual(8, 8), Residual(8, 10, 2), Residual(10, 10))
        self.fc = nn.Linear(10, 5)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class Inverted(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv = nn.Sequential(
            conv_norm(inputs, 9, 1, activation=nn.ReLU6),
            conv_norm(9, 9, 3, stride, groups=9, activation=nn.ReLU6),
            nn.Conv2d(9, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNet(nn.Module):
    """Expand, depthwise, project."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(conv_norm(3, 6, stride=2), Inverted(6, 6), Inverted(6, 8, 2), conv_norm(8, 12, 1))
        self.classifier = nn.Linear(12, 5)

    def forward(self, x):
        x = F.adaptive_avg_pool2d(self.features(x), 1)
        return self.classifier(x.reshape(x.size(0), -1))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.proj(torch.softmax(query @ key.transpose(1, 2), -1) @ value)


class VisionTransformer(nn.Module):
    """Patches of 4 x 4, two encoder blocks."""

    def __init__(self, width=8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 9, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attentions = nn.ModuleList(Attention(width) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for index in range(2):
            x = x + self.attentions[index](self.norms[2 * index](x))
            x = x + self.mlps[index](self.norms[2 * index + 1](x))
        return self.head(x.mean(1))


NETWORKS = {
    "plain": plain,
    "vgg_like": vgg_like,
    "resnet": ResNet,
    "mobilenet": MobileNet,
    "transformer": VisionTransformer,
}


def on_meta(name, size):
    with torch.device("meta"):
        model = build(name, 10, size)
    return Chain.from_module(model, (3, size, size)).to_module()


def traced(model, shape=SHAPE):
    """A network in float64 as one traced module, with BatchNorm statistics unlike fresh ones, and its groups."""
    model = model.double()
    generator = torch.Generator().manual_seed(0)
    for part in model.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for tensor in (part.running_mean, part.running_var, part.weight.data, part.bias.data):
                tensor.uniform_(0.5, 1.5, generator=generator)
    module = Chain.from_module(model, shape).to_module()
    return module, find_groups(module, shape)


def kill(module, slots, channels, value=0.0):
    """Set a channel's part of tensors to a value."""
    tensors = module.state_dict()
    for slot in slots:
        for channel in channels:
            tensors[slot.tensor].narrow(slot.dim, channel * slot.block, slot.block).fill_(value)


def images(count=4, shape=SHAPE):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
