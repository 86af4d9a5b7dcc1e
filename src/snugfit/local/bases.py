"""Fixed bases of LLS: one vector per class, periodic or random (LLS section 3.1). Pure functions.

Shapes: K classes, T length of a unit's latents.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

BasisName = Literal["cosine", "square", "random"]
FrequencyName = Literal["spread", "published"]

PUBLISHED_RANGE = (50.0, 512.0)
"""The authors' frequencies, in radians per sample, for any length."""

PUBLISHED_RANDOM_SCALE = 0.1
"""Standard deviation of the authors' random basis."""


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
