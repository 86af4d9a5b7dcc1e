"""The plain CNNs of the LLS paper: SmallConv, SmallConvL and VGG8 (Table 4, with its errors corrected)."""

from __future__ import annotations

from torch import nn

from snugfit._models.feature_network import POOL, FeatureNetwork, Layout, cannot_halve, convolutions, last_width


class LLSNet(FeatureNetwork):
    """Conv blocks and max-pools, adaptive average pooling to 2x2, one linear block and a linear layer.

    A conv block is a 3x3 convolution with bias, BatchNorm and LeakyReLU; a linear block has a linear layer instead.

    ``hidden`` is the width of the linear block.
    """

    def __init__(self, layout: Layout, hidden: int, classes: int, image_size: int, channels: int) -> None:
        features = convolutions(layout, channels, nn.LeakyReLU, round_up=cannot_halve(image_size, layout))
        block = [nn.Linear(4 * last_width(layout), hidden), nn.BatchNorm1d(hidden), nn.LeakyReLU(inplace=True)]
        super().__init__(features, 2, nn.Sequential(*block, nn.Linear(hidden, classes)))


def smallconv(classes: int, image_size: int, channels: int) -> nn.Module:
    """SmallConv: three conv blocks, the first two of them pooled."""
    return LLSNet((32, POOL, 64, POOL, 128), 512, classes, image_size, channels)


def smallconvl(classes: int, image_size: int, channels: int) -> nn.Module:
    """SmallConvL: SmallConv three times as wide and more."""
    return LLSNet((96, POOL, 192, POOL, 512), 1024, classes, image_size, channels)


def vgg8(classes: int, image_size: int, channels: int) -> nn.Module:
    """VGG8: six conv blocks, with the max-pool between conv 5 and conv 6 that Table 4 omits and Table 3's MACs need."""
    return LLSNet((128, 256, POOL, 256, 256, POOL, 512, POOL, 512), 1024, classes, image_size, channels)


MODELS = {"smallconv": smallconv, "smallconvl": smallconvl, "vgg8": vgg8}
