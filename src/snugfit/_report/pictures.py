"""Pictures of what a run learned, as data (LLS, Figures 2 to 4).

Shapes: K classes shown or all, F frequencies, N images of height H and width W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Spectra:
    """Spectra of the vectors that classes are projected on, and of their mean activations (Figure 2).

    Attributes:
        unit: the unit whose latents these are.
        learned: whether the vectors are combinations that M learned.
        classes: names of the classes shown.
        frequencies: (F,), in cycles per latent.
        basis, latents: magnitudes (K, F).
        prominence: activations at the vector's strongest frequency, as multiples of their median magnitude, (K,).
        images, split: number of images of each class that were averaged, and their split.
    """

    unit: str
    learned: bool
    classes: tuple[str, ...]
    frequencies: np.ndarray
    basis: np.ndarray
    latents: np.ndarray
    prominence: tuple[float, ...]
    images: tuple[int, ...]
    split: str


@dataclass(frozen=True)
class Projection:
    """Rows of M in two dimensions (Figure 3).

    Attributes:
        unit: the unit that M belongs to.
        classes: names of the classes.
        points: (K, 2).
        closest: the two classes with the nearest rows of M.
        groups: super-class of each class; empty if there are none.
        kinship: share of classes whose nearest class is of their own super-class, and the share expected by chance.
        why_no_groups: why super-classes are unknown, if the data set has some.
    """

    unit: str
    classes: tuple[str, ...]
    points: np.ndarray
    closest: tuple[str, str]
    groups: tuple[str, ...] = ()
    kinship: tuple[float, float] = (0.0, 0.0)
    why_no_groups: str = ""


@dataclass(frozen=True)
class HeatMaps:
    """Images, and heat maps of their evidence for the predicted class (Figure 4).

    Attributes:
        images: uint8 (N, C, H, W).
        maps: (N, H, W), not below 0.
        true, predicted: names of classes.
        confidence: probability of the class predicted.
        split: of the images.
    """

    images: np.ndarray
    maps: np.ndarray
    true: tuple[str, ...]
    predicted: tuple[str, ...]
    confidence: tuple[float, ...]
    split: str


@dataclass(frozen=True)
class Pictures:
    """All pictures that a run allows; ``missing`` has a line for each other one, by field name."""

    spectra: Spectra | None = None
    projection: Projection | None = None
    heat_maps: HeatMaps | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
