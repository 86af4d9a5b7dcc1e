"""The plain CNNs of the LLS paper: SmallConv, SmallConvL and VGG8 (Table 4, with its errors corrected)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_POOL = "pool"


class LLSNet(nn.Module):
    """Conv blocks and max-pools, adaptive average pooling to 2x2, one linear block and a linear layer.

    A conv block is a 3x3 convolution with bias, BatchNorm and LeakyReLU; a linear block has a linear layer instead.
    Maps (batch, channels, image_size, image_size) to (batch, classes).

    Args:
        layout: width of each conv block, or ``"pool"`` for a max-pool that halves the feature map.
        hidden: width of the linear block.
        classes: number of outputs.
        image_size: side of the square input in pixels.
        channels: channels of the input.
        dropout: probability of dropping a value after every conv block but the first, behind its pool, and after the
            linear block (the paper's long VGG8 runs: 0.2).
    """

    def __init__(
        self,
        layout: Sequence[int | str],
        hidden: int,
        classes: int,
        image_size: int,
        channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        width = [item for item in layout if isinstance(item, int)][-1]
        self.features = _features(layout, image_size, channels, dropout)
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        block = [nn.Linear(4 * width, hidden), nn.BatchNorm1d(hidden), nn.LeakyReLU(inplace=True)]
        self.classifier = nn.Sequential(*block, *_dropout(dropout), nn.Linear(hidden, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, h, w) to logits (batch, classes)."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits


def _features(layout: Sequence[int | str], image_size: int, channels: int, dropout: float) -> nn.Sequential:
    """The convolution stack; pools round up if the image cannot be halved so often."""
    round_up = image_size % 2 ** list(layout).count(_POOL) != 0
    layers: list[nn.Module] = []
    for index, item in enumerate(layout):
        if isinstance(item, int):
            layers += [nn.Conv2d(channels, item, 3, padding=1), nn.BatchNorm2d(item), nn.LeakyReLU(inplace=True)]
            channels = item
        else:
            layers.append(nn.MaxPool2d(2, ceil_mode=round_up))
        pooled_next = index + 1 < len(layout) and layout[index + 1] == _POOL
        if index > 0 and not pooled_next:
            layers += _dropout(dropout)
    return nn.Sequential(*layers)


def _dropout(probability: float) -> list[nn.Module]:
    return [nn.Dropout(probability)] if probability else []


def smallconv(
    classes: int, image_size: int, channels: int, *, widths: Sequence[int] = (32, 64, 128), hidden: int = 512
) -> nn.Module:
    """SmallConv: three conv blocks of the given widths, the first two of them pooled."""
    first, second, third = widths
    return LLSNet((first, _POOL, second, _POOL, third), hidden, classes, image_size, channels)


def smallconvl(classes: int, image_size: int, channels: int) -> nn.Module:
    """SmallConvL: SmallConv three times as wide and more."""
    return smallconv(classes, image_size, channels, widths=(96, 192, 512), hidden=1024)


def vgg8(
    classes: int,
    image_size: int,
    channels: int,
    *,
    widths: Sequence[int] = (128, 256, 256, 256, 512, 512),
    hidden: int = 1024,
    dropout: float = 0.0,
) -> nn.Module:
    """VGG8: six conv blocks, with the max-pool between conv 5 and conv 6 that Table 4 omits and Table 3's MACs need."""
    a, b, c, d, e, f = widths
    return LLSNet((a, b, _POOL, c, d, _POOL, e, _POOL, f), hidden, classes, image_size, channels, dropout)


MODELS = {"smallconv": smallconv, "smallconvl": smallconvl, "vgg8": vgg8}
