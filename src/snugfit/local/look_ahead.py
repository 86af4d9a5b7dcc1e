"""Auxiliary networks that look ahead: a path shaped like layers to come.

Ma, Wu, Si and Tan, "Scaling supervised local learning with augmented auxiliary networks" (ICLR 2024), section 3. Where
the paper is silent, the authors' public code decides: which layers are sampled, and how depth decreases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from snugfit.errors import UsageError
from snugfit.local.base import LayerShape, LocalLoss, NetworkStats, UnitShape

_HIDDEN = 12
"""Channels between the two convolutions, as in InfoPro."""
PYRAMID = 0.5
"""Share of an auxiliary network's depth that is lost linearly from the first unit to the last (the paper's tau)."""


def can_reconstruct(output_shape: tuple[int, ...], input_shape: tuple[int, ...]) -> bool:
    """Whether both shapes are those of feature maps (C, H, W), and the input's sides can be halved."""
    return len(output_shape) == len(input_shape) == 3 and min(input_shape[1:]) > 1


class Decoder(nn.Module):
    """Two convolutions that reconstruct a module's input from its output, for a second term of a local loss.

    InfoPro (Wang et al., "Revisiting locally supervised learning", ICLR 2021, section 3.3): a module that only
    separates classes discards what later modules could use. Here each module reconstructs its own input at half its
    size, because a cache holds that and not the image; for the first module both are the same.

    Args:
        channels: of the module's output.
        target: channels of the module's input.
    """

    def __init__(self, channels: int, target: int) -> None:
        super().__init__()
        first, last = nn.Conv2d(channels, _HIDDEN, 3, padding=1, bias=False), nn.Conv2d(_HIDDEN, target, 3, padding=1)
        self.layers = nn.Sequential(first, nn.BatchNorm2d(_HIDDEN), nn.ReLU(inplace=True), last)

    def forward(self, features: Tensor, inputs: Tensor) -> Tensor:
        """Mean squared error (scalar) of inputs (B, target, H, W) at half size, from features (B, channels, h, w)."""
        smaller = F.avg_pool2d(inputs, 2)
        return F.mse_loss(self.layers(F.interpolate(features, smaller.shape[2:], mode="bilinear")), smaller)


def auxiliary_depth(depth: int, position: int, count: int) -> int:
    """Layers of a unit's auxiliary network: fewer towards the output, at least one.

    The authors' code rounds halves to the even number, too, so that depths of 2, 3 and 4 all end with 2 layers.

    Args:
        depth: of the first unit's.
        position: number of the unit, from 0.
        count: number of units with an auxiliary network.
    """
    lost = PYRAMID * position / (count - 1) if count > 1 else 0.0
    return max(1, round(depth * (1 - lost) + lost))


def sampled_layers(layers: Sequence[LayerShape], depth: int) -> list[LayerShape]:
    """``depth`` of the layers to come, equally spaced, the last one among them; all if there are no more."""
    if depth >= len(layers):
        return list(layers)
    return [layers[round(len(layers) / depth * step) - 1] for step in range(1, depth + 1)]


def reduction(ratio: int, kernel: int) -> tuple[int, int]:
    """Size of a pool, and stride of a convolution after it, that make maps ``ratio`` times smaller without gaps.

    The authors' code halves maps at most, by strides or by pools. A larger stride than the kernel leaves pixels out.
    """
    stride = ratio if ratio <= kernel else min(2, kernel)
    return max(1, round(ratio / stride)), stride


class MirroredLayer(nn.Module):
    """Convolutions like those of a layer to come, each with batch norm, from feature maps of any size and width.

    Maps much larger than the layer's are pooled first.

    Args:
        channels: of its input (B, channels, H, W).
        size: height and width of its input.
        layer: the layer that it resembles; the output has its width, and about its size.
    """

    def __init__(self, channels: int, size: tuple[int, int], layer: LayerShape) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        width = channels
        strided = next((i for i, conv in enumerate(layer.convs) if max(conv.kernel) > 1), 0)
        ratios = [max(1, round(own / its)) for own, its in zip(size, layer.size, strict=True)]
        rows, columns = map(reduction, ratios, layer.convs[strided].kernel)
        pool, stride = (rows[0], columns[0]), (rows[1], columns[1])
        for index, conv in enumerate(layer.convs):
            filters = width if conv.depthwise else conv.filters
            step = stride if index == strided else (1, 1)
            padding = (conv.kernel[0] // 2, conv.kernel[1] // 2)
            groups = width if conv.depthwise else 1
            parts += [nn.Conv2d(width, filters, conv.kernel, step, padding, groups=groups, bias=False)]
            parts += [nn.BatchNorm2d(filters), nn.ReLU(inplace=True)]
            width = filters
        self.pool = nn.AvgPool2d(pool, ceil_mode=True) if max(pool) > 1 else nn.Identity()
        self.main = nn.Sequential(*parts[:-1])
        self.activation = nn.ReLU(inplace=True)
        self.residual, self.channels = layer.residual, width
        pooled = [math.ceil(own / by) for own, by in zip(size, pool, strict=True)]
        self.size = (math.ceil(pooled[0] / stride[0]), math.ceil(pooled[1] / stride[1]))
        self.shortcut: nn.Module = nn.Identity()
        if layer.residual and (stride != (1, 1) or width != channels):
            projection = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, H, W) to (B, width, h, w)."""
        x = self.pool(x)
        out: Tensor = self.main(x)
        if self.residual:
            out = out + self.shortcut(x)
        activated: Tensor = self.activation(out)
        return activated


class LookAheadLoss(LocalLoss):
    """Layers shaped like those to come, average pool and one linear layer, trained by cross entropy.

    Behind a unit with a flat output, or with no convolution to come, it has no such layers. With ``reconstruction``
    above 0, the weight of a second term, the unit also learns to reconstruct its input (:class:`Decoder`).
    """

    def __init__(self, unit: UnitShape, network: NetworkStats, *, depth: int = 2, reconstruction: float = 0.0) -> None:
        super().__init__()
        if depth < 1:
            raise UsageError(f"depth={depth} must be at least 1; it is the number of layers that auglocal looks ahead.")
        if not 0 <= reconstruction < math.inf:
            raise UsageError(
                f"reconstruction={reconstruction:g} must be a number from 0 on; it is the weight of a term."
            )
        width, path = unit.output_shape[0], list[nn.Module]()
        if not unit.flat:
            own_depth = auxiliary_depth(depth, unit.position, network.units)
            size = (unit.output_shape[1], unit.output_shape[2])
            for layer in sampled_layers(unit.later, own_depth):
                mirrored = MirroredLayer(width, size, layer)
                path.append(mirrored)
                width, size = mirrored.channels, mirrored.size
            path += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.layers = nn.Sequential(*path, nn.Linear(width, network.classes))
        self.weight = reconstruction
        self.decoder: Decoder | None = None
        if reconstruction > 0 and can_reconstruct(unit.output_shape, unit.input_shape):
            self.decoder = Decoder(unit.output_shape[0], unit.input_shape[0])
        one_reader = unit.flat or not unit.later or not path[0].residual
        self.gives_up_gradient = one_reader and self.decoder is None

    def added_loss(self, features: Tensor, inputs: Tensor) -> Tensor | None:
        """The weighted error (scalar) of a unit's input (B, C, H, W), reconstructed from its output (B, C, H, W)."""
        if self.decoder is None:
            return None
        term: Tensor = self.weight * self.decoder(features, inputs)
        return term

    def classifier(self) -> LocalLoss:
        """This loss without the decoder, removed in place."""
        self.decoder = None
        return self

    def predict(self, features: Tensor) -> Tensor:
        """Return logits (B, K) of features (B, C, H, W) or (B, D)."""
        logits: Tensor = self.layers(features)
        return logits


LOSSES = {"auglocal": LookAheadLoss}
