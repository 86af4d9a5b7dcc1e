"""Figures of validation accuracy over seconds under each cap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.queue.curves import Point
from snugfit._report.canvas import PALETTE, STYLE, block_colour

FREE = "no cap"
Curves = Sequence[Sequence[Point]]
"""A curve per seed."""


def draw(caps: Mapping[str, Mapping[str, Curves]], title: str, path: Path) -> None:
    """Write a panel per cap with a line per method and seed, the same bytes for the same numbers.

    Args:
        caps: curves by cap and method; those of the cap ``no cap`` are in every panel.
        title: of the whole figure.
        path: SVG file.
    """
    panels = [cap for cap in caps if cap != FREE] or [FREE]
    methods = list(dict.fromkeys(method for cap in panels for method in caps[cap] if cap != FREE))
    style = {**STYLE, "svg.hashsalt": title, "figure.facecolor": "white", "axes.facecolor": "white"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(2 + 3.4 * len(panels), 3.4), layout="constrained")
        FigureCanvasSVG(figure)
        lines: dict[str, Line2D] = {}
        for axes, cap in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
            for name, curves in caps.get(FREE, {}).items():
                _lines(axes, f"{name}, {FREE}", curves, PALETTE["ink"])
            for name, curves in caps[cap].items() if cap != FREE else ():
                _lines(axes, name, curves, block_colour(methods.index(name)), dashed=methods.index(name) > 4)
            axes.set(title=cap, xlabel="seconds")
            lines |= {str(line.get_label()): line for line in axes.get_legend_handles_labels()[0]}
        figure.legend(handles=list(lines.values()), loc="outside right upper")
        figure.supylabel("validation accuracy (%)", fontsize=10)
        figure.suptitle(title, fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _lines(axes: Axes, name: str, curves: Curves, colour: str, *, dashed: bool = False) -> None:
    for number, curve in enumerate(curves):
        seconds, accuracy = [point[0] for point in curve], [100 * point[1] for point in curve]
        line = axes.plot(seconds, accuracy, color=colour, marker=".", linewidth=1.2, label="" if number else name)
        line[0].set_linestyle("--" if dashed else "-")
