"""Pictures of what a run learned, as data and as a section of its page (LLS, Figures 2 to 4).

Shapes: K classes shown or all, F frequencies, N images of height H and width W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from snugfit._report.formatting import percent
from snugfit._report.markup import html


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


def body(pictures: Pictures) -> str:
    """The section's HTML: every picture, or why it is missing."""
    parts = []
    for name, show in (("spectra", _spectra), ("projection", _projection), ("heat_maps", _heat_maps)):
        data = getattr(pictures, name)
        if data is not None:
            parts.append(show(data))
        elif name in pictures.missing:
            parts.append(html.absent(pictures.missing[name]))
    return html.grid(parts)


def _spectra(data: Spectra) -> str:
    from snugfit._report import picture_figures

    found = [f"{value:.1f} times for {name}" for name, value in zip(data.classes, data.prominence, strict=True)]
    vectors = "the vector d = M b that M made of the basis" if data.learned else "its basis vector b"
    title = f"Mean activations at their class vector's frequency, against a typical one: {', '.join(found)}"
    images = " and ".join(map(str, data.images))
    caption = (
        f"Magnitude of the Fourier transform over the latents of {data.unit}, without its constant part, each relative "
        f"to its highest value. Up: mean of {images} {data.split} images of the class. Down: {vectors}. Dotted: where "
        "that is strongest. Typical: the median over all frequencies."
    )
    svg = picture_figures.spectra(data, "Spectra of class vectors and of mean activations")
    return html.figure(title, svg, caption)


def _projection(data: Projection) -> str:
    from snugfit._report import picture_figures

    title = f"In the learned basis, {data.closest[0]} and {data.closest[1]} are the most similar"
    caption = f"t-SNE of the rows of M of {data.unit}, one per class; only neighbourhoods have a meaning."
    caption += " A tooltip names the class of a point."
    if data.groups:
        share, chance = data.kinship
        title = f"For {percent(share, 0)} of the classes, the nearest class is one of their own super-class"
        caption += f" Nearest: by rows of M, before the projection; by chance it would be {percent(chance)}."
    elif data.why_no_groups:
        caption += f" Super-classes are not shown: {data.why_no_groups}"
    svg = picture_figures.projection(data, "t-SNE of the learned combinations of the basis")
    return html.figure(title, svg, caption)


def _heat_maps(data: HeatMaps) -> str:
    from snugfit._report import picture_figures

    right = sum(true == predicted for true, predicted in zip(data.true, data.predicted, strict=True))
    title = f"What the model looks at: {right} of these {len(data.true)} images are put into their class"
    caption = (
        "Grad-CAM of the last convolution's feature map for the predicted class, on the first images of each class in "
        f"turn ({data.split} split). Every heat map is relative to its own highest value."
    )
    if not data.maps.any(axis=(1, 2)).all():
        caption += " An image without warm colours has no evidence for the class in that feature map."
    return html.figure(title, picture_figures.heat_maps(data, "Grad-CAM heat maps over images"), caption, wide=True)
