"""Reconstruction of a module's input from its output, as a second term of a local loss.

InfoPro (Wang et al., "Revisiting locally supervised learning", ICLR 2021, section 3.3): a module that only separates
classes discards what later modules could use. Here each module reconstructs its own input at half its size, because a
cache holds that and not the image; for the first module both are the same.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

_HIDDEN = 12
"""Channels between the two convolutions, as in InfoPro."""


def can_reconstruct(output_shape: tuple[int, ...], input_shape: tuple[int, ...]) -> bool:
    """Whether both shapes are those of feature maps (C, H, W), and the input's sides can be halved."""
    return len(output_shape) == len(input_shape) == 3 and min(input_shape[1:]) > 1


class Decoder(nn.Module):
    """Two convolutions that reconstruct a module's input from its output.

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
