"""The first 16 layers of YOLOv2 with a small detection head (Redmon and Farhadi, 2017, arXiv:1612.08242).

Twelve convolutions and four pools, which the Tiled paper (Rama and Gerstlauer, section 5.2) counts as layers: darknet's
``yolov2.cfg`` up to the second feature map before its fifth pool, 1/16 of the image's side. A convolution has no bias
and is followed by BatchNorm and LeakyReLU(0.1). BatchNorm is torch's, which divides by the biased variance with its
epsilon inside the root; darknet's does neither.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from snugfit.errors import ModelError

LAYERS: Final[tuple[tuple[int, int] | str, ...]] = (
    *((32, 3), "pool", (64, 3), "pool", (128, 3), (64, 1), (128, 3), "pool"),
    *((256, 3), (128, 1), (256, 3), "pool", (512, 3), (256, 1), (512, 3), (256, 1)),
)
"""Channels and kernel of each convolution; ``"pool"`` halves the feature map."""

STRIDE = 16
ANCHORS = 5
"""Boxes per cell of the last feature map; the paper's number."""
HEAD_WIDTH = 512
SLOPE = 0.1


class YOLOv2Stem(nn.Module):
    """The 16 layers and the head: a 3x3 convolution and a 1x1 convolution with a bias.

    Maps (batch, channels, S, S) to (batch, 5 (5 + classes), S/16, S/16): for each of the 5 anchors the offsets and
    log-sizes of a box, its objectness and the logits of its class, as :mod:`snugfit.detection` reads them.
    """

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for layer in LAYERS:
            if isinstance(layer, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += _convolution(channels, *layer)
                channels = layer[0]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            *_convolution(channels, HEAD_WIDTH, 3), nn.Conv2d(HEAD_WIDTH, ANCHORS * (5 + classes), 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, S, S) to raw predictions (batch, 5 (5 + classes), S / 16, S / 16)."""
        boxes: torch.Tensor = self.head(self.features(x))
        return boxes


def _convolution(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(SLOPE, inplace=True),
    ]


def yolov2_16(classes: int, image_size: int, channels: int) -> nn.Module:
    """YOLOv2's first 16 layers (608x608 in the paper) with a detection head.

    Raises:
        ModelError: the image's side is not a multiple of 16.
    """
    if image_size % STRIDE:
        raise ModelError(
            f"yolov2_16 halves its images four times, so --image-size must be a multiple of {STRIDE}, not {image_size}."
        )
    return YOLOv2Stem(classes, channels)


MODELS = {"yolov2_16": yolov2_16}
