"""Small networks of one's own, with layers that the networks by name do not have: GroupNorm, squeeze-excitation."""

from __future__ import annotations

from torch import Tensor, nn


class SqueezeExcite(nn.Module):
    """Scale every channel of (B, C, H, W) by what its mean says."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        few = max(channels // 4, 4)
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, few, 1), nn.ReLU(), nn.Conv2d(few, channels, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip

    def forward(self, maps: Tensor) -> Tensor:
        """Maps of the same shape."""
        scaled: Tensor = maps * self.scale(maps)
        return scaled


def _block(before: int, after: int, norm: nn.Module, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, stride, 1, bias=False), norm, nn.Hardswish()]


def group_norms(classes: int) -> nn.Module:
    """Three convolutions with GroupNorm and Hardswish."""
    layers = [*_block(3, 24, nn.GroupNorm(4, 24), 1), *_block(24, 48, nn.GroupNorm(6, 48), 2)]
    layers += _block(48, 96, nn.GroupNorm(8, 96), 2)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, classes))


def squeezing(classes: int) -> nn.Module:
    """BatchNorm, Hardswish and squeeze-excitation."""
    layers = [*_block(3, 16, nn.BatchNorm2d(16), 2), SqueezeExcite(16)]
    layers += [*_block(16, 64, nn.BatchNorm2d(64), 2), SqueezeExcite(64)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, classes))
