"""Size, style, axes and legends of all figures. Imports matplotlib, so it is imported only to draw.

Figures are drawn on Agg without pyplot, so a caller's own backend and settings do not change.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from snugfit._core.record import ExitRecord
from snugfit._report.formatting import count, percent
from snugfit._report.metrics import Curve
from snugfit._report.svg import BLOCK_COLOURS, PALETTE, TIP, block_colour, themed

WIDTH = 4.6
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("svg.fonttype", "figure.facecolor", "axes.facecolor"), "none"),
    **dict.fromkeys(("text.parse_math", "axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), PALETTE["muted"]),
    **dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 10),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size", "xtick.minor.size", "ytick.minor.size"), 0),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.8),
    **{"grid.color": PALETTE["grid"], "text.color": PALETTE["ink"], "font.family": "DejaVu Sans"},
    **{"lines.linewidth": 1.8, "lines.solid_capstyle": "round"},
}
"""matplotlib settings of every figure; text is not converted to paths, so that the page's own font shows it."""


def canvas(xlabel: str, ylabel: str, height: float = 3.1, width: float = WIDTH) -> tuple[Figure, Axes]:
    """An empty figure, ``width`` x ``height`` inches; the y label is horizontal, above the axis."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    if ylabel:
        axes.set_title(ylabel, loc="left", fontsize=10, color=PALETTE["muted"])
    return figure, axes


def inline(figure: Figure, label: str) -> str:
    """The figure as an inline SVG; its label also makes its inner ids different from other figures'."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": label}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the page's fonts show it
        figure.savefig(buffer, format="svg")
    return themed(buffer.getvalue(), label)


def write_at(axes: Axes, words: str, at: tuple[float, float], offset: tuple[float, float], **look: Any) -> None:
    """Write words next to a point of the axes, ``offset`` points away."""
    axes.annotate(words, at, offset, textcoords="offset points", **look)


def legend(figure: Figure, entries: Sequence[tuple[str, str, str]]) -> None:
    """A legend row above the axes: label, colour and marker (``-`` for a line, ``--`` for a dashed one)."""
    handles = []
    for label, colour, marker in entries:
        if marker in ("-", "--"):
            style: Literal["-", "--"] = "-" if marker == "-" else "--"
            handles.append(Line2D([], [], color=colour, linewidth=2.4, linestyle=style, label=label))
        else:
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", markersize=7, label=label))
    spacing = {"handlelength": 1.8, "handletextpad": 0.5, "columnspacing": 1.2, "borderpad": 0.1}
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 5), **spacing)


def block_legend(figure: Figure, blocks: Iterable[int], word: str = "block") -> None:
    """A legend of blocks, or of what ``word`` names; none for a single one or if colours repeat."""
    shown = sorted(set(blocks))
    if 1 < len(shown) <= BLOCK_COLOURS:
        legend(figure, [(f"{word} {block + 1}", block_colour(block), "-") for block in shown])


def limit_line(axes: Axes, value: float, text: str, *, left: bool = False) -> None:
    """A dashed horizontal line with its name at one end; the budget's colour, or grey for a limit on the left."""
    colour = PALETTE["muted" if left else "budget"]
    axes.axhline(value, color=colour, linestyle=(0, (4, 2)), linewidth=1.6)
    at, offset, side = ((0, value), (3, 4), "left") if left else ((1, value), (0, 4), "right")
    write_at(axes, text, at, offset, xycoords=axes.get_yaxis_transform(), ha=side, color=colour, fontsize=10)


def unit_axis(axes: Axes, units: int) -> None:
    """Whole numbers from 1 to the number of units."""
    axes.set_xlim(0.4, units + 0.6)
    if units <= 20:
        axes.set_xticks(range(1, units + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))


def exit_point(axes: Axes, x: float, y: float, point: ExitRecord, chosen: int | None) -> None:
    """One exit; the chosen one is large, has its own colour, and is named."""
    mine = point.index == chosen
    tip = f"unit {point.index + 1}, {point.unit}: {percent(point.val_accuracy)}, {count(point.parameters)} parameters"
    marker, colour, size, order = ("D", PALETTE["chosen"], 9, 4) if mine else ("o", PALETTE["measured"], 5, 3)
    axes.plot(x, y, marker, color=colour, markersize=size, zorder=order, gid=TIP + tip)
    if mine:
        write_at(axes, f"unit {point.index + 1}", (x, y), (0, 9), ha="center", color=colour, fontweight="bold")


def label_ends(axes: Axes, lines: Sequence[tuple[float, float, int, str]], x: float) -> None:
    """Number straight lines at their end on the right or upper edge of the axes, the steepest first.

    A number that would cover another is left out.

    Args:
        axes: to draw on; its value axis is already set.
        lines: value at 0, value at ``x``, number and colour of every line.
        x: right end of the axis.
    """
    placed: list[tuple[float, float]] = []
    top = axes.get_ylim()[1]
    for start, end, number, colour in sorted(lines, key=lambda line: -line[1]):
        right = end <= top
        at = (1.0, end / top) if right else ((top - start) / (end - start), 1.0)
        if all(max(abs(at[0] - other[0]) / 0.035, abs(at[1] - other[1]) / 0.055) >= 1 for other in placed):
            placed.append(at)
            offset, va, ha = ((4, 0), "center_baseline", "left") if right else ((0, 3), "bottom", "center")
            look = {"va": va, "ha": ha, "color": colour, "fontsize": 9, "annotation_clip": False}
            write_at(axes, str(number), (at[0] * x, at[1] * top), offset, **look)


def name_spans(figure: Figure, axes: Axes, drawn: Sequence[Curve], blocks: Mapping[str, int], scale: float) -> None:
    """Name the blocks: a legend for a few, numbers along the top for many, nothing for one."""
    if len(drawn) <= BLOCK_COLOURS:
        word = "interval" if all(curve.phase.startswith("interval ") for curve in drawn) else "block"
        block_legend(figure, (blocks[curve.phase] for curve in drawn), word)
        return
    for curve in drawn:
        middle = (curve.seconds[0] + curve.seconds[-1]) / 2 / scale
        block = blocks[curve.phase]
        look = {"ha": "center", "fontsize": 9, "color": block_colour(block)}
        write_at(axes, str(block + 1), (middle, 1), (0, -8), xycoords=axes.get_xaxis_transform(), **look)


def time_scale(longest: float) -> tuple[str, float]:
    """Unit of a time axis that ends at ``longest`` seconds, and its seconds."""
    if longest >= 3 * 3600:
        return "h", 3600.0
    return ("min", 60.0) if longest >= 180 else ("s", 1.0)
