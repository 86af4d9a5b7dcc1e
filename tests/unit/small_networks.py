"""Small networks of every kind that ``elastic`` meets, and their profiles."""

import torch
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit.memory import Baseline, MemoryLimit
from snugfit.strategies.elastic.probes import ElasticProbes

CLASSES = 10
NO_LIMIT = MemoryLimit(None, Baseline(0, 0), torch.device("cpu"))


def vgg_like(width=16):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 64, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    )  # fmt: skip


class Residual(nn.Module):
    """As torchvision's BasicBlock."""

    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1 or width != out:
            self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResidualNet(nn.Module):
    """As torchvision's ResNet."""

    def __init__(self, width=16):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(width, width, 1), Residual(width, width, 1))
        self.layer2 = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, CLASSES)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class Inverted(nn.Module):
    """As torchvision's InvertedResidual."""

    def __init__(self, width, out, stride):
        super().__init__()
        hidden = 4 * width
        self.conv = nn.Sequential(
            nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.residual = stride == 1 and width == out

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNet(nn.Module):
    """As torchvision's MobileNetV2."""

    def __init__(self, width=8):
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6(inplace=True)),
            Inverted(width, width, 1), Inverted(width, 2 * width, 2), Inverted(2 * width, 2 * width, 1),
            nn.Sequential(nn.Conv2d(2 * width, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU6(inplace=True)),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, CLASSES))

    def forward(self, x):
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


class Attention(nn.Module):
    """Self-attention that reads its own parameters without a layer."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * width, width) / width**0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x):
        parts = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        query, key, value = (torch.unflatten(parts[i], -1, (self.heads, -1)).transpose(1, 2) for i in range(3))
        return self.out_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attention, self.ln_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TinyViT(nn.Module):
    """As torchvision's VisionTransformer; maps (B, 3, side, side) to (B, CLASSES)."""

    def __init__(self, width=32, heads=2, layers=2, side=32, patch=4):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.layers = nn.Sequential(*(Encoder(width, heads) for _ in range(layers)))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.head(self.ln(self.layers(x + self.pos_embedding))[:, 0])


NETWORKS = {"vgg": vgg_like, "residual": ResidualNet, "mobilenet": MobileNet, "vit": TinyViT}
SHAPE = (3, 32, 32)


def workload(batch=8, optimizer=None, shape=SHAPE):
    return Workload(
        "small", "made up", shape, CLASSES, train_count=64, val_count=8, test_count=8, batch_size=batch,
        optimizer=optimizer or OptimizerSettings(),
    )  # fmt: skip


def probes_of(model, batch=8, lean=True, optimizer=None, shape=SHAPE):
    chain = Chain.from_module(model.to("meta"), shape)
    return ElasticProbes(chain, workload(batch, optimizer, shape), "cpu", lean)


def profile_of(model, batch=8, lean=True, optimizer=None, shape=SHAPE):
    found = probes_of(model, batch, lean, optimizer, shape).tensors(batch).measure_operators(NO_LIMIT)
    assert found is not None
    return found


def nodes_of(blocks):
    """Blocks as ``run_per_sample`` takes them: nodes by name."""
    return {block.name: block.nodes for block in blocks}
