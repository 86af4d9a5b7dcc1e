"""The plain CNNs of the LLS paper: SmallConv, SmallConvL and VGG8 (Table 4, with its errors corrected)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from snugfit._models.feature_network import POOL, FeatureNetwork, Layout, cannot_halve, convolutions, last_width


class LLSNet(FeatureNetwork):
    """Conv blocks and max-pools, adaptive average pooling to 2x2, one linear block and a linear layer.

    A conv block is a 3x3 convolution with bias, BatchNorm and LeakyReLU; a linear block has a linear layer instead.

    ``hidden`` is the width of the linear block. ``dropout`` is the probability of dropping a value after every conv
    block but the first, behind its pool, and after the linear block (the paper's long VGG8 runs: 0.2).
    """

    def __init__(
        self,
        layout: Layout,
        hidden: int,
        classes: int,
        image_size: int,
        channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        round_up = cannot_halve(image_size, layout)
        features = convolutions(layout, channels, nn.LeakyReLU, round_up=round_up, dropout=dropout)
        block = [nn.Linear(4 * last_width(layout), hidden), nn.BatchNorm1d(hidden), nn.LeakyReLU(inplace=True)]
        dropped = [nn.Dropout(dropout)] if dropout else []
        super().__init__(features, 2, nn.Sequential(*block, *dropped, nn.Linear(hidden, classes)))


def smallconv(
    classes: int, image_size: int, channels: int, *, widths: Sequence[int] = (32, 64, 128), hidden: int = 512
) -> nn.Module:
    """SmallConv: three conv blocks of the given widths, the first two of them pooled."""
    first, second, third = widths
    return LLSNet((first, POOL, second, POOL, third), hidden, classes, image_size, channels)


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
    return LLSNet((a, b, POOL, c, d, POOL, e, POOL, f), hidden, classes, image_size, channels, dropout)


MODELS = {"smallconv": smallconv, "smallconvl": smallconvl, "vgg8": vgg8}
