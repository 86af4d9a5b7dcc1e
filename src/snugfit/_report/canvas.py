"""What the figures have in common: size, style, axes, legends. Imports matplotlib, so it is imported only to draw.

Figures are drawn on Agg without pyplot, so a caller's own backend and settings stay as they are.
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
    "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 10, "text.parse_math": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": PALETTE["muted"], "axes.linewidth": 0.8,
    "axes.labelcolor": PALETTE["muted"], "axes.labelsize": 10, "axes.axisbelow": True, "axes.grid": True,
    "grid.color": PALETTE["grid"], "grid.linewidth": 0.8, "text.color": PALETTE["ink"], "lines.linewidth": 1.8,
    "xtick.color": PALETTE["muted"], "ytick.color": PALETTE["muted"], "xtick.labelsize": 10, "ytick.labelsize": 10,
    "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "legend.frameon": False, "legend.fontsize": 10, "lines.solid_capstyle": "round",
    "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip
"""matplotlib settings of every figure; text stays text, so that the page's own font shows it."""


def canvas(xlabel: str, ylabel: str, height: float = 3.1, width: float = WIDTH) -> tuple[Figure, Axes]:
    """An empty figure, ``width`` x ``height`` inches; the y label stands above the axis, where it reads level."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    if ylabel:
        axes.set_title(ylabel, loc="left", fontsize=10, color=PALETTE["muted"])
    return figure, axes


def inline(figure: Figure, label: str) -> str:
    """The figure as an inline SVG; its label also keeps its inner ids apart from other figures'."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": label}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the page's fonts show it
        figure.savefig(buffer, format="svg")
    return themed(buffer.getvalue(), label)


def legend(figure: Figure, entries: Sequence[tuple[str, str, str]]) -> None:
    """A legend row above the axes: label, colour and marker (``-`` for a line, ``--`` for a dashed one)."""
    handles = []
    for label, colour, marker in entries:
        if marker in ("-", "--"):
            style: Literal["-", "--"] = "-" if marker == "-" else "--"
            handles.append(Line2D([], [], color=colour, linewidth=2.4, linestyle=style, label=label))
        else:
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", markersize=7, label=label))
    figure.legend(
        handles=handles, loc="outside upper left", ncols=min(len(handles), 5),
        handlelength=1.8, handletextpad=0.5, columnspacing=1.2, borderpad=0.1,
    )  # fmt: skip


def block_legend(figure: Figure, blocks: Iterable[int], word: str = "block") -> None:
    """A legend of blocks, or what ``word`` calls them; none for a single one or where colours come round again."""
    shown = sorted(set(blocks))
    if 1 < len(shown) <= BLOCK_COLOURS:
        legend(figure, [(f"{word} {block + 1}", block_colour(block), "-") for block in shown])


def limit_line(axes: Axes, value: float, text: str, *, left: bool = False) -> None:
    """A dashed horizontal line with its name at one end; the budget's colour, or grey for a limit on the left."""
    colour = PALETTE["muted" if left else "budget"]
    axes.axhline(value, color=colour, linestyle=(0, (4, 2)), linewidth=1.6)
    axes.annotate(
        text, (0 if left else 1, value), (3 if left else 0, 4), xycoords=axes.get_yaxis_transform(),
        textcoords="offset points", ha="left" if left else "right", color=colour, fontsize=10,
    )  # fmt: skip


def unit_axis(axes: Axes, units: int) -> None:
    """Whole numbers from 1 to the number of units."""
    axes.set_xlim(0.4, units + 0.6)
    if units <= 20:
        axes.set_xticks(range(1, units + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))


def exit_point(axes: Axes, x: float, y: float, point: ExitRecord, chosen: int | None) -> None:
    """One exit; the chosen one is large, of its own colour, and named."""
    mine = point.index == chosen
    tip = f"unit {point.index + 1}, {point.unit}: {percent(point.val_accuracy)}, {count(point.parameters)} parameters"
    axes.plot(
        x, y, "D" if mine else "o", color=PALETTE["chosen" if mine else "measured"], markersize=9 if mine else 5,
        zorder=4 if mine else 3, gid=TIP + tip,
    )  # fmt: skip
    if mine:
        axes.annotate(
            f"unit {point.index + 1}", (x, y), (0, 9), textcoords="offset points", ha="center",
            color=PALETTE["chosen"], fontweight="bold",
        )  # fmt: skip


def label_ends(axes: Axes, lines: Sequence[tuple[float, float, int, str]], x: float) -> None:
    """Number straight lines where they leave the axes, at the right or at the top, the steepest first.

    A number that would cover another is left out.

    Args:
        axes: where to; its value axis is already set.
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
            axes.annotate(
                str(number), (at[0] * x, at[1] * top), (4, 0) if right else (0, 3), textcoords="offset points",
                va="center_baseline" if right else "bottom", ha="left" if right else "center", color=colour,
                fontsize=9, annotation_clip=False,
            )  # fmt: skip


def name_spans(figure: Figure, axes: Axes, drawn: Sequence[Curve], blocks: Mapping[str, int], scale: float) -> None:
    """Say which block is which: a legend for a few, numbers along the top for many, nothing for one."""
    if len(drawn) <= BLOCK_COLOURS:
        word = "interval" if all(curve.phase.startswith("interval ") for curve in drawn) else "block"
        block_legend(figure, (blocks[curve.phase] for curve in drawn), word)
        return
    for curve in drawn:
        middle = (curve.seconds[0] + curve.seconds[-1]) / 2 / scale
        axes.annotate(
            str(blocks[curve.phase] + 1), (middle, 1), (0, -8), xycoords=axes.get_xaxis_transform(),
            textcoords="offset points", ha="center", fontsize=9, color=block_colour(blocks[curve.phase]),
        )  # fmt: skip


def time_scale(longest: float) -> tuple[str, float]:
    """Unit of a time axis that ends at ``longest`` seconds, and its seconds."""
    if longest >= 3 * 3600:
        return "h", 3600.0
    return ("min", 60.0) if longest >= 180 else ("s", 1.0)
