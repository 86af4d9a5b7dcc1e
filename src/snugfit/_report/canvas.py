"""Size, style, axes and legends of all figures, and their SVG. Imports matplotlib, so it is imported only to draw.

Figures are drawn on Agg without pyplot, so a caller's own backend and settings do not change.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

PALETTE: dict[str, str] = {
    "ink": "#1b2330",
    "muted": "#667080",
    "grid": "#e1e5ea",
    "card": "#fffffe",
    "measured": "#2f6fb6",
    "predicted": "#bcd3ec",
    "budget": "#c2332b",
    "chosen": "#d9570c",
    "block1": "#2f6fb5",
    "block2": "#c27c00",
    "block3": "#0f9d7a",
    "block4": "#7a2660",
    "block5": "#49a9de",
}
"""Colours that figures are drawn in; each becomes ``var(--NAME)``, light and dark in ``style.css``."""

TIP = "tip:"
"""Prefix of an artist's gid whose rest becomes its tooltip."""

BLOCK_COLOURS = 5
"""After this many blocks colours repeat."""

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

PREDICTED_MEASURED = [("predicted", PALETTE["predicted"], "s"), ("measured", PALETTE["measured"], "s")]
_DASHED: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.6}


def block_colour(index: int) -> str:
    """Colour of block ``index`` (from 0): five colours that colour-blind readers can distinguish, then again."""
    return PALETTE[f"block{index % BLOCK_COLOURS + 1}"]


def new_figure(
    xlabel: str, ylabel: str, height: float = 3.1, width: float = WIDTH, *, grid: str = "both"
) -> tuple[Figure, Axes]:
    """An empty figure, ``width`` x ``height`` inches; the y label is horizontal, above the axis.

    ``grid`` is the axis that has grid lines: ``x``, ``y`` or ``both``.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    if ylabel:
        axes.set_title(ylabel, loc="left", fontsize=10, color=PALETTE["muted"])
    if grid != "both":
        axes.grid(visible=False, axis="y" if grid == "x" else "x")
    return figure, axes


def inline(figure: Figure, label: str) -> str:
    """The figure as an inline ``<svg>`` element: small, themed by CSS variables, with tooltips.

    The prolog, metadata, style sheet and unused ids are dropped. The label, for screen readers, also makes the figure's
    inner ids different from other figures'.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": label}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the page's fonts show it
        figure.savefig(buffer, format="svg")
    document = buffer.getvalue()
    body = document[document.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*</defs>", "", body)
    body = re.sub(rf'<g id="{TIP}([^"]*)">', r"<g><title>\1</title>", body)
    body = re.sub(r'<g id="[^"]*">', "<g>", body).replace("xlink:href", "href")
    view = re.search(r'viewBox="([^"]*)"', body)
    assert view is not None
    head = f'<svg viewBox="{view.group(1)}" role="img" aria-label="{html.escape(label)}">'
    body = re.sub(r"^<svg[^>]*>", lambda _: head, body, count=1, flags=re.DOTALL)
    for name, colour in PALETTE.items():
        body = body.replace(colour, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", body).strip()


def write_at(axes: Axes, words: str, at: tuple[float, float], offset: tuple[float, float], **look: Any) -> None:
    """Write words next to a point of the axes, ``offset`` points away."""
    axes.annotate(words, at, offset, textcoords="offset points", **look)


def legend(figure: Figure, entries: Sequence[tuple[str, str, str]]) -> None:
    """A legend row above the axes: label, colour and marker (``-`` for a line, ``--`` for a dashed one)."""
    handles = []
    for label, colour, marker in entries:
        look: dict[str, Any] = {"marker": marker, "linestyle": "", "markersize": 7}
        if marker in ("-", "--"):
            look = {"linewidth": 2.4, "linestyle": marker}
        handles.append(Line2D([], [], color=colour, label=label, **look))
    spacing = {"handlelength": 1.8, "handletextpad": 0.5, "columnspacing": 1.2, "borderpad": 0.1}
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 5), **spacing)


def block_legend(figure: Figure, blocks: set[int], word: str = "block") -> None:
    """A legend of blocks, or of what ``word`` names; none for a single one or if colours repeat."""
    if 1 < len(blocks) <= BLOCK_COLOURS:
        legend(figure, [(f"{word} {block + 1}", block_colour(block), "-") for block in sorted(blocks)])


def budget_line(axes: Axes, value: float, *, vertical: bool = False) -> None:
    """A dashed line in the budget's colour."""
    (axes.axvline if vertical else axes.axhline)(value, color=PALETTE["budget"], **_DASHED)


def limit_line(axes: Axes, value: float, text: str, *, left: bool = False) -> None:
    """A dashed horizontal line with its name at one end; the budget's colour, or grey for a limit on the left."""
    colour = PALETTE["muted" if left else "budget"]
    axes.axhline(value, color=colour, **_DASHED)
    at, offset, side = ((0, value), (3, 4), "left") if left else ((1, value), (0, 4), "right")
    write_at(axes, text, at, offset, xycoords=axes.get_yaxis_transform(), ha=side, color=colour, fontsize=10)


def whole_ticks(axes: Axes, most: int, all_up_to: int = 12, ticks: int = 12) -> None:
    """Whole numbers from 1 to ``most``: all of them up to ``all_up_to``, otherwise about as many as ``ticks``."""
    if most <= all_up_to:
        axes.set_xticks(range(1, most + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))


def unit_axis(axes: Axes, units: int) -> None:
    """Whole numbers from 1 to the number of units."""
    axes.set_xlim(0.4, units + 0.6)
    whole_ticks(axes, units, 20, 10)
