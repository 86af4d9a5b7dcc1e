"""Draws Figure 5.2 of the Tiled paper from the numbers of :mod:`benchmarks.tilecosts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

COLOURS = {"one": "#c44e52", "every": "#4c72b0", "best": "#55a868"}
NAMES = {"one": "1 group", "every": "16 groups", "best": "least sent"}


def draw(cell: dict[str, Any], path: Path) -> None:
    """Write the five panels as one picture, the same bytes for the same numbers."""
    with mpl.rc_context({"font.size": 8, "svg.hashsalt": "tiled", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 6), layout="constrained")
        FigureCanvasSVG(figure)
        (computing, sending, parts), (forward, backward, empty) = figure.subplots(2, 3)
        _bars(computing, cell["macs"], 1e9, "(a) computation", "GMAC per tile")
        _bars(sending, cell["halo_floats"], 1e3 / 4, "(b) boundary communication", "kB per tile")
        _components(parts, cell["components_mb"])
        _ratios(forward, cell["ratios"]["forward"], "(d) forward")
        _ratios(backward, cell["ratios"]["backward"], "(e) backward")
        empty.axis("off")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _bars(axes: Axes, values: dict[str, dict[str, float]], unit: float, title: str, label: str) -> None:
    for place, name in enumerate(NAMES):
        heights = [values[direction][name] / unit for direction in ("forward", "backward")]
        axes.bar([place / 4 + each for each in (0, 1)], heights, 0.22, color=COLOURS[name], label=NAMES[name])
    axes.set(title=title, ylabel=label, xticks=[0.25, 1.25], xticklabels=["forward", "backward"])
    axes.legend(frameon=False)


def _components(axes: Axes, rows: list[dict[str, float]]) -> None:
    batches = [row["batch"] for row in rows]
    for name in rows[0]:
        if name != "batch":
            axes.plot(batches, [row[name] for row in rows], marker=".", label=name, linestyle=_style(name))
    axes.set(
        title="(c) communication with batch size", xlabel="batch", ylabel="MB per tile", xscale="log", yscale="log"
    )
    axes.legend(frameon=False)


def _style(name: str) -> str:
    """Samples and the halos of 16 groups are nearly the same, so that one line must not hide the other."""
    return ":" if name.startswith("halos") else "-"


def _ratios(axes: Axes, rows: list[dict[str, Any]], title: str) -> None:
    for name in ("one", "every"):
        axes.plot(
            [row["ratio"] for row in rows], [row[name] for row in rows], color=COLOURS[name], label=NAMES[name]
        )  # fmt: skip
    axes.set(title=title, xlabel="cost of a value sent / of a MAC", ylabel="cost / cheapest", xscale="log")
    axes.legend(frameon=False)
