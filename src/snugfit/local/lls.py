"""LLS: local learning by projection onto a fixed basis (Apolinario, Roy and Roy, section 3), and its two variants."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from snugfit.errors import UsageError
from snugfit.local.base import LocalLoss, NetworkStats, UnitShape
from snugfit.local.bases import BasisName, FrequencyName, make_basis
from snugfit.local.latents import LATENT_LIMIT, WINDOW, Latents

if TYPE_CHECKING:
    from typing_extensions import Self

ModeName = Literal["paper", "published"]

PUBLISHED_TEMPERATURE = 0.5
MIXING_SCALE = 0.01
"""Standard deviation of the initial modulation M; the paper gives none, this is the authors'."""


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
        self.latents = Latents(unit.map_shape, limit, window)
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


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product (N, T) by (T, K), in float32 under autocast too.

    In bfloat16 oneDNN keeps 1 MB of code for each batch size, forward and backward.
    """
    dtype = torch.promote_types(left.dtype, right.dtype)
    lowers = torch.amp.is_autocast_available(left.device.type)  # not on the meta device
    with torch.autocast(left.device.type, enabled=False) if lowers else nullcontext():
        return left.to(dtype) @ right.to(dtype)


LOSSES = {"lls": LLS, "lls-m": LLSM, "lls-mxm": LLSMxM}
