"""Mixup and CutMix: each image of a step is mixed with the one before it, and so are their targets.

All images of a step share one draw. The partner is the image before in the step, the last one for the first, as in
torchvision's ``MixUp`` and ``CutMix``; so a micro-batch needs only one image of another one, and mixes as the whole
batch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Mix:
    """How the images of one step are mixed.

    Attributes:
        share: of the image itself in its target; the rest is that of its partner.
        box: top, bottom, left and right of the pixels that come from the partner; None to blend all pixels.
    """

    share: float
    box: tuple[int, int, int, int] | None = None

    def images(self, images: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Mix float images (B, C, H, W) in place, each with the one before; the first with ``before`` (C, H, W)."""
        for row in reversed(range(len(images))):
            self._mix(images[row], images[row - 1] if row else before)
        return images

    def _mix(self, image: torch.Tensor, partner: torch.Tensor) -> None:
        """Mix an image (C, H, W) in place with its partner (C, H, W)."""
        if self.box is None:
            image.lerp_(partner, 1 - self.share)
        else:
            top, bottom, left, right = self.box
            image[:, top:bottom, left:right] = partner[:, top:bottom, left:right]

    def targets(self, labels: torch.Tensor, before: torch.Tensor, classes: int) -> torch.Tensor:
        """Probabilities (B, classes) of labels (B,), or (B, classes) float32; the first follows ``before`` (1, ...)."""
        partners = torch.cat([before, labels[:-1]])
        own, other = (each if each.dim() > 1 else F.one_hot(each, classes).float() for each in (labels, partners))
        return own.mul(self.share).add_(other, alpha=1 - self.share)


@dataclass(frozen=True)
class Mixing:
    """Draws how the images of a step are mixed; with both parameters one of the two at random, at equal chances.

    Attributes:
        classes: number of classes.
        mixup, cutmix: parameters alpha of the Beta distributions of shares; None leaves that kind out.
    """

    classes: int
    mixup: float | None = None
    cutmix: float | None = None

    def draw(self, seed: Sequence[int], height: int, width: int) -> Mix:
        """How images of this size in pixels are mixed in the step of this seed.

        Zhang et al., mixup (ICLR 2018), equation 1; Yun et al., CutMix (ICCV 2019), equation 2: a box beyond the border
        is cut off, and the share is that of the pixels that are left.
        """
        rng = np.random.default_rng(tuple(seed))
        kinds = [(kind, alpha) for kind, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)) if alpha is not None]
        kind, alpha = kinds[int(rng.integers(len(kinds)))]
        share = float(rng.beta(alpha, alpha))
        if kind == "mixup":
            return Mix(share)
        side = 0.5 * np.sqrt(1 - share)
        edges: list[int] = []
        for size in (height, width):
            centre, half = int(rng.integers(size)), int(side * size)
            edges += [max(centre - half, 0), min(centre + half, size)]
        top, bottom, left, right = edges
        return Mix(1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))
