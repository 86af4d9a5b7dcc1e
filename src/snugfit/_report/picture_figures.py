"""The figures of the pictures section, each a function from arrays to an inline SVG. Imported only to draw."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from snugfit._report.canvas import STYLE, WIDTH, canvas, inline, legend
from snugfit._report.formatting import percent, shorten
from snugfit._report.pictures import HeatMaps, Projection, Spectra
from snugfit._report.svg import PALETTE, TIP

HEAT = "turbo"
MOST_NAMED = 30
"""Up to this many classes have their name next to their point; more would overlap."""


@mpl.rc_context(STYLE)
def spectra(data: Spectra, label: str) -> str:
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
    legend(figure, [("mean activation", PALETTE["measured"], "-"), (vector, PALETTE["chosen"], "-")])
    return inline(figure, label)


@mpl.rc_context(STYLE)
def projection(data: Projection, label: str) -> str:
    """A point per class, coloured by super-class, or named."""
    groups = sorted(set(data.groups))
    figure, axes = canvas("t-SNE, first dimension (no unit)", "second dimension (no unit)", 4.4 + 0.1 * len(groups))
    looks = {group: _look(index) for index, group in enumerate(groups)}
    for index, (name, (x, y)) in enumerate(zip(data.classes, data.points, strict=True)):
        group = data.groups[index] if data.groups else ""
        colour, marker = looks.get(group, (PALETTE["measured"], "o"))
        axes.plot(x, y, marker, color=colour, markersize=7, gid=f"{TIP}{name}" + (f", {group}" if group else ""))
        if not groups and len(data.classes) <= MOST_NAMED:
            axes.annotate(shorten(name, 16), (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=9)
    axes.margins(0.1)
    axes.set_xticks([])
    axes.set_yticks([])
    handles = [
        axes.plot([], [], look[1], color=look[0], label=group.replace("_", " "))[0] for group, look in looks.items()
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, handletextpad=0.2)
    return inline(figure, label)


@mpl.rc_context(STYLE)
def heat_maps(data: HeatMaps, label: str) -> str:
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
    return inline(figure, label)


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


def _look(index: int) -> tuple[Any, str]:
    """Colour and marker of a group: twenty different ones, then again."""
    return mpl.colormaps["tab10"](index % 10), "o^"[index // 10 % 2]


def _show(axes: Axes, image: np.ndarray) -> None:
    grey = image.shape[-1] == 1
    axes.imshow(image[..., 0] if grey else image, cmap="gray", vmin=0, vmax=255, interpolation="none")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """An empty figure of ``size`` inches, and its axes as an array (rows, columns)."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)
