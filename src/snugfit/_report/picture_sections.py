"""The section of a run's page with pictures of what it learned. Imported only to draw."""

from __future__ import annotations

from snugfit._report import picture_figures
from snugfit._report.formatting import percent
from snugfit._report.markup import html
from snugfit._report.pictures import HeatMaps, Pictures, Projection, Spectra


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
    right = sum(true == predicted for true, predicted in zip(data.true, data.predicted, strict=True))
    title = f"What the model looks at: {right} of these {len(data.true)} images are put into their class"
    caption = (
        "Grad-CAM of the last convolution's feature map for the predicted class, on the first images of each class in "
        f"turn ({data.split} split). Every heat map is relative to its own highest value."
    )
    if not data.maps.any(axis=(1, 2)).all():
        caption += " An image without warm colours has no evidence for the class in that feature map."
    return html.figure(title, picture_figures.heat_maps(data, "Grad-CAM heat maps over images"), caption, wide=True)
