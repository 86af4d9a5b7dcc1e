"""The section of a run's page with pictures of what it learned. Imported only to draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from snugfit._report import canvas
from snugfit._report.canvas import PALETTE, STYLE, TIP, WIDTH
from snugfit._report.formatting import percent, shorten
from snugfit._report.markup import html

if TYPE_CHECKING:
    from snugfit._report.pictures import HeatMaps, Pictures, Projection, Spectra

HEAT = "turbo"
MOST_NAMED = 30
"""Up to this many classes have their name next to their point; more would overlap."""


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
    return html.figure(title, _draw_spectra(data), caption)


def _projection(data: Projection) -> str:
    title = f"In the learned basis, {data.closest[0]} and {data.closest[1]} are the most similar"
    caption = f"t-SNE of the rows of M of {data.unit}, one per class; only neighbourhoods have a meaning."
    caption += " A tooltip names the class of a point."
    if data.groups:
        share, chance = data.group_agreement
        title = f"For {percent(share, 0)} of the classes, the nearest class is one of their own super-class"
        caption += f" Nearest: by rows of M, before the projection; by chance it would be {percent(chance)}."
    elif data.why_no_groups:
        caption += f" Super-classes are not shown: {data.why_no_groups}"
    return html.figure(title, _draw_projection(data), caption)


def _heat_maps(data: HeatMaps) -> str:
    right = sum(true == predicted for true, predicted in zip(data.true, data.predicted, strict=True))
    title = f"What the model looks at: {right} of these {len(data.true)} images are put into their class"
    caption = (
        "Grad-CAM of the last convolution's feature map for the predicted class, on the first images of each class in "
        f"turn ({data.split} split). Every heat map is relative to its own highest value."
    )
    if not data.maps.any(axis=(1, 2)).all():
        caption += " An image without warm colours has no evidence for the class in that feature map."
    return html.figure(title, _draw_heat_maps(data), caption, wide=True)


@mpl.rc_context(STYLE)
def _draw_spectra(data: Spectra) -> str:
    """One panel per class: its activations' magnitude upwards, its vector's downwards."""
    figure, panels = _panels(len(data.classes), 1, (WIDTH, 0.9 + 1.5 * len(data.classes)), sharex=True)
    for axes, name, basis, latents in zip(panels[:, 0], data.classes, data.basis, data.latents, strict=True):
        frequencies, strongest = data.frequencies[1:], data.frequencies[1 + int(basis[1:].argmax())]
        axes.axvline(strongest, color=PALETTE["muted"], linestyle=":", linewidth=1)
        _stems(axes, frequencies, -_relative(basis[1:]), PALETTE["chosen"])
        _stems(axes, frequencies, _relative(latents[1:]), PALETTE["measured"])
        axes.set_title(f"class {shorten(name, 30)}", loc="left", fontsize=10, color=PALETTE["muted"])
        axes.set(xlim=(0, 0.5), ylim=(-1.08, 1.08), ylabel="magnitude (relative)")
        axes.set_yticks([-1, 0, 1], ["1", "0", "1"])
    panels[-1, 0].set_xlabel("spatial frequency (cycles per latent)")
    vector = "vector d = M b" if data.learned else "basis vector b"
    canvas.legend(figure, [("mean activation", PALETTE["measured"], "-"), (vector, PALETTE["chosen"], "-")])
    return canvas.inline(figure, "Spectra of class vectors and of mean activations")


@mpl.rc_context(STYLE)
def _draw_projection(data: Projection) -> str:
    """A point per class, coloured by super-class, or named."""
    groups = sorted(set(data.groups))
    figure, axes = canvas.new_figure(
        "t-SNE, first dimension (no unit)", "second dimension (no unit)", 4.4 + 0.1 * len(groups)
    )
    ten = mpl.colormaps["tab10"]
    looks: dict[str, tuple[Any, str]] = {
        group: (ten(index % 10), "o^"[index // 10 % 2]) for index, group in enumerate(groups)
    }
    for index, (name, (x, y)) in enumerate(zip(data.classes, data.points, strict=True)):
        group = data.groups[index] if data.groups else ""
        colour, marker = looks.get(group, (PALETTE["measured"], "o"))
        axes.plot(x, y, marker, color=colour, markersize=7, gid=f"{TIP}{name}" + (f", {group}" if group else ""))
        if not groups and len(data.classes) <= MOST_NAMED:
            axes.annotate(shorten(name, 16), (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=9)
    axes.margins(0.1)
    axes.set(xticks=[], yticks=[])
    handles = [
        axes.plot([], [], marker, color=colour, label=group.replace("_", " "))[0]
        for group, (colour, marker) in looks.items()
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, handletextpad=0.2)
    return canvas.inline(figure, "t-SNE of the learned combinations of the basis")


@mpl.rc_context(STYLE)
def _draw_heat_maps(data: HeatMaps) -> str:
    """Images above, and below them the same in grey under their heat maps."""
    count = len(data.images)
    figure, panels = _panels(2, count, (2.4 * WIDTH, 2.4 * WIDTH * 2.3 / (count + 0.6)))
    for column, image in enumerate(data.images):
        upper, lower = panels[:, column]
        _show(upper, image.transpose(1, 2, 0))
        _show(lower, overlay(image, data.maps[column]))
        upper.set_title(shorten(data.true[column], 20), fontsize=11, color=PALETTE["ink"])
        right = data.true[column] == data.predicted[column]
        said = f"{shorten(data.predicted[column], 16)}, {percent(data.confidence[column], 0)}"
        lower.set_xlabel(said, fontsize=11, color=PALETTE["ink" if right else "budget"])
    panels[0, 0].set_ylabel("image, true class", fontsize=11)
    panels[1, 0].set_ylabel("predicted class", fontsize=11)
    scale = figure.colorbar(ScalarMappable(cmap=HEAT), ax=panels, shrink=0.7, aspect=30, pad=0.01)
    scale.set_ticks([0, 1], labels=["none", "most"])
    scale.set_label("evidence for the class")
    scale.outline.set_visible(False)
    return canvas.inline(figure, "Grad-CAM heat maps over images")


def overlay(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """An image, uint8 (C, H, W), in grey under its heat map (H, W): (H, W, 3) in [0, 1]; all cold without heat."""
    grey = image.astype(float).mean(0) / 255
    colours = np.asarray(mpl.colormaps[HEAT](_relative(heat)))[..., :3]
    return np.asarray(0.5 * grey[..., None] + 0.5 * colours)


def _relative(values: np.ndarray) -> np.ndarray:
    largest = max(float(values.max()), np.finfo(float).tiny)
    return values / largest


def _stems(axes: Axes, x: np.ndarray, heights: np.ndarray, colour: str) -> None:
    """Draw vertical lines from 0 at ``x`` (F,) to ``heights`` (F,), as one path, which halves the size of the page."""
    gaps = np.full_like(heights, np.nan)
    ends = np.stack([np.zeros_like(heights), heights, gaps], axis=1).ravel()
    axes.plot(np.repeat(x, 3), ends, color=colour, linewidth=1)


def _show(axes: Axes, image: np.ndarray) -> None:
    grey = image.shape[-1] == 1
    axes.imshow(image[..., 0] if grey else image, cmap="gray", vmin=0, vmax=255, interpolation="none")
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """An empty figure of ``size`` inches, and its axes as an array (rows, columns)."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)
