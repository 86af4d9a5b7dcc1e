"""The figures of tensor selection, each a function from intervals to an inline SVG. Imported only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from snugfit._core.record import IntervalRecord
from snugfit._quantities import format_seconds
from snugfit._report.canvas import STYLE, WIDTH, canvas, inline, legend, limit_line, write_at
from snugfit._report.formatting import count, share
from snugfit._report.intervals import Tensors, epoch_words
from snugfit._report.svg import PALETTE, TIP

LEAST_CELLS = 30
"""The figure has space for at least this many tensors."""
MOST_ROWS = 14
"""Up to this many intervals have numbers next to their row; of more, every second one, and so on."""
LEAST_BARS = 4
"""The figure has space for at least this many bars, so that a few bars are not too wide."""
_FLOPS = ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))


@mpl.rc_context(STYLE)
def selections(intervals: Sequence[IntervalRecord], tensors: Tensors, label: str) -> str:
    """Which tensors each interval trains (ElasticTrainer, Figure 21).

    Args:
        intervals: the rows, first above.
        tensors: the columns, the network's input on the left.
        label: text for screen readers.
    """
    rows, columns = len(intervals), len(tensors.names)
    every = -(-rows // MOST_ROWS)
    figure, axes = canvas("", "epochs", 1.15 + 0.27 * rows / every, 2.4 * WIDTH)
    axes.set_xlabel("tensor, in order of execution (input on the left)", loc="left")
    chosen = [frozenset(each.tensors) for each in intervals]
    for column, name in enumerate(tensors.names, 1):
        trained = [row for row in range(rows) if name in chosen[row]]
        tip = TIP + _tip(column, name, tensors, len(trained), rows)
        axes.add_patch(Rectangle((column - 0.5, -0.5), 1, rows, facecolor=PALETTE["grid"], gid=tip, linewidth=0))
        if trained:
            colour = PALETTE["chosen" if name in tensors.classifier else "measured"]
            axes.add_patch(PathPatch(_cells(column, trained), facecolor=colour, gid=tip, linewidth=0))
    for row, (interval, mine) in enumerate(zip(intervals, chosen, strict=True)):
        if row:
            axes.axhline(row - 0.5, color=PALETTE["card"], linewidth=2 if every == 1 else 0.8)
        if row % every == 0:
            write_at(axes, _sum(interval, mine, tensors), (columns + 0.5, row), (6, 0), **_AT_END_OF_ROW)
    shown = range(0, rows, every)
    axes.set_yticks(shown, [epoch_words(intervals[row]) for row in shown], color=PALETTE["ink"])
    axes.set(xlim=(0.5, max(columns, LEAST_CELLS) + 0.5), ylim=(rows - 0.5, -0.5))
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    _whole_ticks(axes, columns)
    entries = [("trains", PALETTE["measured"], "s"), ("classifier, always trains", PALETTE["chosen"], "s")]
    legend(figure, [*entries, ("frozen", PALETTE["grid"], "s")])
    return inline(figure, label)


_AT_END_OF_ROW: dict[str, Any] = dict(
    va="center_baseline", ha="left", fontsize=9, color=PALETTE["muted"], annotation_clip=False
)


def _tip(column: int, name: str, tensors: Tensors, times: int, rows: int) -> str:
    size = f", {count(tensors.parameters[name])} parameters" if name in tensors.parameters else ""
    role = ", classifier" if name in tensors.classifier else ""
    return f"{column}, {name}{role}{size}: trains in {times} of {rows} interval{'s' if rows > 1 else ''}"


def _sum(interval: IntervalRecord, chosen: frozenset[str], tensors: Tensors) -> str:
    """How many tensors and parameters an interval trains."""
    parameters = tensors.counted(interval.tensors)
    words = f"{len(chosen)} tensor{'s' if len(chosen) != 1 else ''}"
    return words if parameters is None else f"{words}, {count(parameters)} parameters"


def _cells(column: int, rows: Sequence[int]) -> Path:
    """The cells of a column as one path, which makes the page much smaller than single rectangles."""
    left, right = column - 0.44, column + 0.44
    corners, codes = [], []
    for row in rows:
        corners += [(left, row - 0.5), (right, row - 0.5), (right, row + 0.5), (left, row + 0.5), (left, row - 0.5)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(corners, codes)


@mpl.rc_context(STYLE)
def flops(intervals: Sequence[IntervalRecord], images: int, label: str) -> str:
    """Floating-point operations of every epoch, with those of full training as a line (ElasticTrainer, Figure 18).

    Args:
        intervals: of the run.
        images: training images of an epoch.
        label: text for screen readers.
    """
    full = 2.0 * max(each.full_macs for each in intervals) * images
    scale, unit = next(((scale, unit) for scale, unit in _FLOPS if full >= scale), (1e3, "kFLOPs"))
    figure, axes = canvas("epoch", f"operations per epoch ({unit})")
    for index, interval in enumerate(intervals):
        value = 2 * interval.macs * images / scale
        ratio = share(interval.macs / max(interval.full_macs, 1))
        tip = f"{TIP}interval {index + 1}, epochs {epoch_words(interval)}: {value:.3g} {unit}, {ratio} of full training"
        for epoch in range(interval.first_epoch + 1, interval.first_epoch + interval.epochs + 1):
            axes.bar(epoch, value, 0.82, color=PALETTE["measured"], gid=tip)
    limit_line(axes, full / scale, "full training", left=True)
    axes.set_ylim(0, 1.16 * max(full, *(2.0 * each.macs * images for each in intervals)) / scale)
    last = max(each.first_epoch + each.epochs for each in intervals)
    axes.set_xlim(0.4, max(last, LEAST_BARS) + 0.6)
    _whole_ticks(axes, last)
    axes.grid(visible=False, axis="x")
    return inline(figure, label)


@mpl.rc_context(STYLE)
def step_times(intervals: Sequence[IntervalRecord], ratio: float | None, label: str) -> str:
    """Predicted and measured step time of every interval, with a full step's as a line, and rho's share of it.

    Args:
        intervals: of the run.
        ratio: the budget rho.
        label: text for screen readers.
    """
    full = max(each.full_seconds for each in intervals)
    longest = max(full, *(max(each.predicted_seconds, each.measured_seconds) for each in intervals))
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
    figure, axes = canvas("interval", f"time of a step ({unit})")
    for number, interval in enumerate(intervals, 1):
        predicted, measured = interval.predicted_seconds, interval.measured_seconds
        words = format_seconds(measured) if measured else "none"
        tip = f"{TIP}interval {number}: predicted {format_seconds(predicted)}, measured {words}"
        axes.bar(number, predicted / scale, 0.72, color=PALETTE["predicted"], gid=tip)
        axes.bar(number, measured / scale, 0.42, color=PALETTE["measured"], gid=tip)
    limit_line(axes, full / scale, "full step", left=True)
    entries = [("predicted", PALETTE["predicted"], "s"), ("measured, median", PALETTE["measured"], "s")]
    if ratio is not None:
        axes.axhline(ratio * full / scale, color=PALETTE["budget"], linestyle=(0, (4, 2)), linewidth=1.6)
        entries.append((f"rho {ratio:g}", PALETTE["budget"], "--"))
    axes.set_ylim(0, 1.16 * longest / scale)
    axes.set_xlim(0.4, max(len(intervals), LEAST_BARS) + 0.6)
    _whole_ticks(axes, len(intervals))
    axes.grid(visible=False, axis="x")
    legend(figure, entries)
    return inline(figure, label)


def _whole_ticks(axes: Axes, most: int) -> None:
    """Whole numbers from 1."""
    if most <= 12:
        axes.set_xticks(range(1, most + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
