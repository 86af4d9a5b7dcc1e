"""LLS: local learning by projection onto a fixed basis (Apolinario, Roy and Roy, section 3), and its variants.

Shapes: B batch, K classes, T length of a unit's latents.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from snugfit.errors import UsageError
from snugfit.lean import average_pool
from snugfit.local.base import LocalLoss, NetworkStats, UnitShape

if TYPE_CHECKING:
    from typing_extensions import Self

BasisName = Literal["cosine", "square", "random"]
FrequencyName = Literal["spread", "published"]
ModeName = Literal["paper", "published"]

PUBLISHED_TEMPERATURE = 0.5
MIXING_SCALE = 0.01
"""Standard deviation of the initial modulation M; the paper gives none, this is the authors'."""

LATENT_LIMIT = 2048
"""Most values per sample that a projection reads, if pooling can reach that."""

COARSEST_SIDE, WINDOW = 2, 8
"""Pooling windows are at least 8 x 8 pixels if 2 x 2 or more of them fit on the feature map."""

PUBLISHED_RANGE = (50.0, 512.0)
"""The authors' frequencies, in radians per sample, for any length."""

PUBLISHED_RANDOM_SCALE = 0.1
"""Standard deviation of the authors' random basis."""


def pooled_side(channels: int, height: int, width: int, limit: int = LATENT_LIMIT, window: int = WINDOW) -> int:
    """Side of the pooled square feature map: the largest power of two that its size, the limit and the windows allow.

    It is 1 if even single pixels have more than ``limit`` values. The paper gives only the limit. The windows reproduce
    the sides that the authors set by hand for each layer of SmallConv, SmallConvL, VGG8 and MobileNetV1. Finer ones
    learn worse: docs/methods/lls.md.
    """
    shorter = min(height, width)
    side = int(max(1, min(math.sqrt(limit / channels), max(COARSEST_SIDE, shorter // window), shorter)))
    return 1 << (side.bit_length() - 1)


class Latents(nn.Module):
    """Turn a unit's output, (B, C, H, W) or (B, D), into latents (B, T).

    ``shape`` is one sample's output's, ``limit`` the most values if pooling alone can reach it (longer vectors are
    pooled too), and ``window`` the smallest side of a pooling window in pixels. ``length`` is T. A network's head that
    averages the output to ``head_side`` reads no finer positions, so neither do the latents.
    """

    def __init__(
        self, shape: tuple[int, ...], limit: int = LATENT_LIMIT, window: int = WINDOW, head_side: int | None = None
    ) -> None:
        super().__init__()
        self.side = pooled_side(*shape, limit=limit, window=window) if len(shape) == 3 else 0
        if head_side is not None:
            self.side = min(self.side, head_side)
        self.length = shape[0] * self.side**2 if self.side else min(shape[0], limit)

    def forward(self, features: Tensor) -> Tensor:
        """Compute latents (B, T) from (B, C, H, W) or (B, D)."""
        if self.side:
            return average_pool(features, self.side).flatten(1)
        if features.shape[1] == self.length:
            return features
        return F.adaptive_avg_pool1d(features[:, None], self.length)[:, 0]


def frequencies(name: FrequencyName, classes: int, length: int) -> Tensor:
    """Angular frequency of each class in radians per sample, (K,) float64.

    ``spread`` spaces them equally over what ``length`` samples can represent (section 3.1): from one period in all
    samples to the Nyquist frequency, both left out. ``published`` spaces them over :data:`PUBLISHED_RANGE`, far beyond
    Nyquist, so that they fold back to an irregular set.
    """
    if name == "published":
        return torch.linspace(*PUBLISHED_RANGE, classes, dtype=torch.float64)
    slowest, fastest = 2 * math.pi / length, math.pi
    steps = torch.arange(1, classes + 1, dtype=torch.float64)
    return slowest + (fastest - slowest) * steps / (classes + 1)


def cosine(angular: Tensor, length: int) -> Tensor:
    """``cos(f_c t)`` for t = 1..T: (K,) frequencies in radians per sample to (K, T)."""
    times = torch.arange(1, length + 1, dtype=angular.dtype, device=angular.device)
    return torch.cos(angular[:, None] * times)


def square(angular: Tensor, length: int) -> Tensor:
    """``sign(cos(f_c t))`` for t = 1..T: (K,) frequencies in radians per sample to (K, T) of -1 and 1."""
    return torch.where(cosine(angular, length) >= 0, 1.0, -1.0).to(angular.dtype)


def random(classes: int, length: int, seed: int) -> Tensor:
    """Gaussian noise of standard deviation 0.1, the same for the same seed, (K, T) float64."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(classes, length, generator=generator, dtype=torch.float64)
    return PUBLISHED_RANDOM_SCALE * noise


def make_basis(name: BasisName, rule: FrequencyName, classes: int, length: int, seed: int = 0) -> Tensor:
    """The basis ``name``, (K, T) float32; periodic ones do not depend on ``seed``, the random one not on ``rule``."""
    if name == "random":
        return random(classes, length, seed).float()
    wave = {"cosine": cosine, "square": square}[name]
    return wave(frequencies(rule, classes, length), length).float()


class LLS(LocalLoss):
    """Cross entropy on the projection of a unit's latents onto a fixed basis (eq. 3), without trained parameters.

    Args:
        unit, network: statistics of the unit and its network.
        basis: ``cosine``, ``square`` or ``random``.
        frequencies: ``spread`` over what the latents' length can represent, or as ``published``.
        mode: ``paper`` (eq. 3 as printed), or ``published``: latents of unit length and a temperature of 0.5.
        limit: most values after pooling.
        window: smallest side of a pooling window in pixels.
        stored: keep the basis in memory; otherwise it is generated in every step.
        seed: seed of a random basis, which is the same for all units with latents of one length.
    """

    before_pool: ClassVar[bool] = True
    detached_head: ClassVar[bool] = True
    gives_up_gradient: bool = True
    mixing_axes: ClassVar[int] = 0
    """Number of axes of the trainable M, each as long as the number of classes."""

    def __init__(
        self,
        unit: UnitShape,
        network: NetworkStats,
        *,
        basis: BasisName = "square",
        frequencies: FrequencyName = "published",
        mode: ModeName = "published",
        limit: int = LATENT_LIMIT,
        window: int = WINDOW,
        stored: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, choices in (
            ("basis", basis, BasisName),
            ("frequencies", frequencies, FrequencyName),
            ("mode", mode, ModeName),
        ):
            if value not in get_args(choices):
                raise UsageError(f"{name} of a local loss is {' or '.join(get_args(choices))}, not {value}.")
        if limit < 1 or window < 1:
            raise UsageError(f"limit and window of a local loss must be at least 1, not {limit} and {window}.")
        if not 0 <= seed < 2**63:
            raise UsageError(f"seed of a local loss is a number from 0 to 2^63 - 1, not {seed}.")
        self.latents = Latents(unit.map_shape, limit, window, unit.head_side)
        self.pooled_side = self.latents.side or None
        self.classes, self.mode = network.classes, mode
        self._make = partial(make_basis, basis, frequencies, self.classes, self.latents.length, seed)
        self.stored: Tensor | None
        self.register_buffer("stored", torch.empty(self.classes, self.latents.length) if stored else None)
        self._generated: Tensor | None = None
        shape = (self.classes,) * self.mixing_axes
        self.mixing = nn.Parameter(torch.empty(shape)) if shape else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Create the stored basis, and draw M."""
        if self.stored is not None and not self.stored.is_meta:
            self.stored.copy_(self._make())
        if self.mixing is not None:
            nn.init.normal_(self.mixing, std=MIXING_SCALE)

    def basis(self) -> Tensor:
        """The fixed basis b, (K, T); in evaluation mode it is generated only once."""
        if self.stored is not None:
            return self.stored
        if self.training:
            return self._make()
        if self._generated is None:
            self._generated = self._make()
        return self._generated

    def train(self, mode: bool = True) -> Self:
        """Set the mode and free the basis kept for evaluation."""
        self._generated = None
        return super().train(mode)

    def basis_in_use(self) -> Tensor:
        """The effective basis, (K, T): b, or the d made of it by M (eqs. 5 and 6)."""
        return self.modulate(self.basis().T).T

    def read(self, features: Tensor) -> Tensor:
        """Compute the latents h, (B, T), from a unit's feature map, (B, C, H, W) or (B, D)."""
        latents: Tensor = self.latents(features)
        return F.normalize(latents, dim=1) if self.mode == "published" else latents

    def project(self, features: Tensor) -> Tensor:
        """Compute ``h b^T``, (B, K), from a unit's feature map, (B, C, H, W) or (B, D)."""
        latents = self.read(features)
        return _product(latents, self.basis().to(latents.device).T)

    def modulate(self, projection: Tensor) -> Tensor:
        """Convert the projection onto b, (B, K), to that onto the effective basis, (B, K); here they are equal."""
        return projection

    def predict(self, features: Tensor) -> Tensor:
        """Return logits (B, K) of features (B, C, H, W) or (B, D)."""
        logits = self.modulate(self.project(features))
        return logits / PUBLISHED_TEMPERATURE if self.mode == "published" else logits


class LLSM(LLS):
    """LLS-M: the basis is ``d = M * b``, one trainable factor per class (section 3.2, eq. 5)."""

    mixing_axes: ClassVar[int] = 1
    mixing: nn.Parameter

    def modulate(self, projection: Tensor) -> Tensor:
        """Return ``h d^T = M * (h b^T)``, (B, K)."""
        return projection * self.mixing

    def signal_macs(self, unit: UnitShape) -> int:
        """MACs of the projection, plus K for each of M's products with it: forward, its gradient, and M's own."""
        return super().signal_macs(unit) + 3 * self.classes


class LLSMxM(LLS):
    """LLS-MxM: the basis is ``d = M b``, a trainable linear combination of all vectors (section 3.2, eq. 6)."""

    mixing_axes: ClassVar[int] = 2
    mixing: nn.Parameter

    def modulate(self, projection: Tensor) -> Tensor:
        """Return ``h d^T = (h b^T) M^T``, (B, K)."""
        return _product(projection, self.mixing.T)


class LinearLocalLoss(LocalLoss):
    """Average pooling to at most 2048 values and one linear layer without bias: LLS with a trained basis."""

    before_pool: ClassVar[bool] = True
    detached_head: ClassVar[bool] = True
    gives_up_gradient: bool = True

    def __init__(self, unit: UnitShape, network: NetworkStats) -> None:
        super().__init__()
        self.latents = Latents(unit.map_shape, head_side=unit.head_side)
        self.pooled_side = self.latents.side or None
        self.linear = nn.Linear(self.latents.length, network.classes, bias=False)

    def predict(self, features: Tensor) -> Tensor:
        """Return logits (B, K) of features (B, C, H, W) or (B, D)."""
        logits: Tensor = self.linear(self.latents(features))
        return logits


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product (N, T) by (T, K), in float32 under autocast too.

    In bfloat16 oneDNN keeps 1 MB of code for each batch size, forward and backward.
    """
    dtype = torch.promote_types(left.dtype, right.dtype)
    lowers = torch.amp.is_autocast_available(left.device.type)  # not on the meta device
    with torch.autocast(left.device.type, enabled=False) if lowers else nullcontext():
        return left.to(dtype) @ right.to(dtype)


LOSSES = {"linear": LinearLocalLoss, "lls": LLS, "lls-m": LLSM, "lls-mxm": LLSMxM}
