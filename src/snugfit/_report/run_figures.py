"""The report's figures, each a function from data to an inline SVG. Imported only to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter

from snugfit._core.profile import ProbeLine
from snugfit._core.record import ExitRecord, PhaseRecord
from snugfit._quantities import format_bytes
from snugfit._report.canvas import (
    STYLE,
    block_legend,
    canvas,
    exit_point,
    inline,
    label_ends,
    legend,
    limit_line,
    name_spans,
    time_scale,
    unit_axis,
    write_at,
)
from snugfit._report.formatting import MB, count, phase_label, shorten
from snugfit._report.metrics import Curve
from snugfit._report.svg import PALETTE, TIP, block_colour

MOST_ROWS = 16
"""Up to this many phases have a figure of full height, with names and numbers at every bar."""


@mpl.rc_context(STYLE)
def peaks(phases: Sequence[PhaseRecord], budget: int | None, label: str) -> str:
    """Predicted and measured peak of every phase against the budget (this run's Figure 5 of NeuroFlux)."""
    every = -(-len(phases) // MOST_ROWS)
    figure, axes = canvas("peak memory (MB)", "", height=max(1.6, 0.9 + 0.42 * len(phases) / every))
    sizes = [(phase.predicted_peak_bytes / MB, phase.measured_peak_bytes / MB) for phase in phases]
    right = 1.04 * max((budget or 0) / MB, *map(max, sizes))
    for row, (phase, (predicted, measured)) in enumerate(zip(phases, sizes, strict=True)):
        tip = f"{TIP}{phase.name}: predicted {predicted:.1f} MB, measured {measured:.1f} MB"
        axes.barh(row, predicted, 0.72, color=PALETTE["predicted"], gid=tip)
        axes.barh(row, measured, 0.42, color=PALETTE["measured"], gid=tip)
        if every > 1:
            continue
        inside = measured > 0.15 * right
        x, offset, side, colour = (
            (measured, -4, "right", "card") if inside else (max(predicted, measured), 4, "left", "ink")
        )
        look = {"ha": side, "va": "center_baseline", "fontsize": 9, "color": PALETTE[colour]}
        write_at(axes, f"{measured:.1f}", (x, row), (offset, 0), **look)
    shown = range(0, len(phases), every)
    axes.set_yticks(shown, [phase_label(phases[row].name) for row in shown], color=PALETTE["ink"])
    axes.set_ylim(len(phases) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    entries = [("predicted", PALETTE["predicted"], "s"), ("measured", PALETTE["measured"], "s")]
    if budget is not None:
        axes.axvline(budget / MB, color=PALETTE["budget"], linestyle=(0, (4, 2)), linewidth=1.6)
        entries.append((f"budget {format_bytes(budget)}", PALETTE["budget"], "--"))
    axes.set_xlim(0, right)
    legend(figure, entries)
    return inline(figure, label)


@mpl.rc_context(STYLE)
def memory_lines(
    lines: Mapping[str, ProbeLine], blocks: Mapping[str, int], available: float | None, largest: int, label: str
) -> str:
    """The memory model: every unit's line over batch size with its measured points (Figure 8 of NeuroFlux).

    Args:
        lines: fitted line by unit name, in chain order.
        blocks: index of the block that each unit trained in.
        available: bytes that a unit may use.
        largest: right end of the batch axis.
        label: text for screen readers.
    """
    figure, axes = canvas("batch size", "peak memory of one step (MB)", height=3.4)
    ends: list[tuple[float, float, int, str]] = []
    for number, (unit, line) in enumerate(lines.items(), 1):
        colour = block_colour(blocks[unit]) if unit in blocks else PALETTE["muted"]
        tip = f"{TIP}unit {number}, {unit}: {format_bytes(line.sample_bytes)} per sample"
        start, end = (line.bytes_at(batch) / MB for batch in (0, largest))
        axes.plot([0, largest], [start, end], color=colour, linewidth=1.4, gid=tip)
        points = [(p.batch, p.peak_bytes / MB) for p in line.points if p.batch <= largest]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=3.5, gid=tip)
        ends.append((start, end, number, colour))
    axes.set_xlim(0, largest)
    top = max(end[1] for end in ends)
    axes.set_ylim(0, 1.06 * (min(top, 2.2 * available / MB) if available else top))
    label_ends(axes, ends, largest)
    if available is not None and available / MB <= axes.get_ylim()[1]:
        limit_line(axes, available / MB, "budget")
    block_legend(figure, {blocks[unit] for unit in lines if unit in blocks})
    return inline(figure, label)


@mpl.rc_context(STYLE)
def batches(
    largest: Sequence[int], used: Sequence[int | None], blocks: Sequence[int | None], limit: int | None, label: str
) -> str:
    """Largest batch of every unit within the budget, and the batch its block used (Figure 6 of NeuroFlux).

    Args:
        largest: largest batch per unit, in chain order.
        used: batch size of the unit's block, None for units that did not train.
        blocks: index of the unit's block.
        limit: the batch limit of the workload.
        label: text for screen readers.
    """
    figure, axes = canvas("unit", "batch size")
    numbers = np.arange(1, len(largest) + 1)
    for number, size, batch, block in zip(numbers, largest, used, blocks, strict=True):
        tip = f"{TIP}unit {number}: at most {size}" + (f", trained with {batch}" if batch else "")
        axes.bar(number, max(size, 0.9), 0.8, color=PALETTE["predicted"], gid=tip)
        if batch and block is not None:
            axes.plot([number - 0.5, number + 0.5], [batch] * 2, color=block_colour(block), linewidth=3, gid=tip)
    axes.set_yscale("log", base=2)
    axes.set_ylim(bottom=0.5 if min(largest) < 2 else 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(visible=False, axis="x")
    unit_axis(axes, len(largest))
    if limit:
        limit_line(axes, limit, f"batch limit {limit}", left=True)
    shown = sorted({block for block in blocks if block is not None})
    entries = [("fits", PALETTE["predicted"], "s")]
    entries += [(f"block {block + 1}", block_colour(block), "-") for block in shown] if len(shown) <= 4 else []
    legend(figure, entries)
    return inline(figure, label)


@mpl.rc_context(STYLE)
def exit_accuracy(exits: Sequence[ExitRecord], chosen: int | None, label: str) -> str:
    """Validation accuracy of the exit after every unit (Figure 10 of NeuroFlux)."""
    figure, axes = canvas("exit after unit", "validation accuracy (%)")
    numbers, accuracy = [e.index + 1 for e in exits], [100 * e.val_accuracy for e in exits]
    axes.plot(numbers, accuracy, color=PALETTE["measured"])
    for point, number, value in zip(exits, numbers, accuracy, strict=True):
        exit_point(axes, number, value, point, chosen)
    unit_axis(axes, max(numbers))
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    return inline(figure, label)


@mpl.rc_context(STYLE)
def exit_frontier(exits: Sequence[ExitRecord], frontier: Sequence[ExitRecord], chosen: int | None, label: str) -> str:
    """Validation accuracy against parameters, with the line of exits that nothing smaller beats."""
    figure, axes = canvas("parameters of the exit model", "validation accuracy (%)")
    sizes = [e.parameters for e in frontier] + [max(e.parameters for e in exits)]
    best = [100 * e.val_accuracy for e in (*frontier, frontier[-1])]
    axes.step(sizes, best, where="post", color=PALETTE["muted"], linewidth=1.2, linestyle=(0, (3, 2)))
    for point in exits:
        exit_point(axes, point.parameters, 100 * point.val_accuracy, point, chosen)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)
    return inline(figure, label)


@mpl.rc_context(STYLE)
def confusion(matrix: Sequence[Sequence[int]], names: Sequence[str], label: str) -> str:
    """Confusion matrix, every row as shares of its true class; no tick labels beyond 20 classes."""
    size = len(matrix)
    figure, axes = canvas("predicted class", "true class", height=4.4)
    counts = np.asarray(matrix, dtype=float)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    red, green, blue = (int(PALETTE["measured"][i : i + 2], 16) / 255 for i in (1, 3, 5))
    axes.imshow(np.dstack([np.full_like(share, c) for c in (red, green, blue)] + [share**0.7]), interpolation="none")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    short = [shorten(name, 14) for name in names] if len(names) == size else [str(i) for i in range(size)]
    shown = range(size) if size <= 20 else []
    axes.set_xticks(shown, short if size <= 20 else [], rotation=90)
    axes.set_yticks(shown, short if size <= 20 else [])
    if size <= 12:
        for row, column in np.argwhere(share >= 0.005):
            colour = "#ffffff" if share[row, column] > 0.45 else PALETTE["ink"]
            words = f"{100 * share[row, column]:.0f}"
            axes.text(column, row, words, ha="center", va="center_baseline", fontsize=9, color=colour)
    return inline(figure, label)


@mpl.rc_context(STYLE)
def over_time(
    drawn: Sequence[Curve],
    title: str,
    label: str,
    *,
    blocks: Mapping[str, int],
    points: Sequence[Curve] = (),
    limit: float | None = None,
) -> str:
    """Curves over the elapsed time of the run, coloured by phase.

    Args:
        drawn: one curve per phase.
        title: label of the value axis.
        label: text for screen readers.
        blocks: index of every phase, which gives its colour.
        points: values that are drawn as points on a line (validation accuracy).
        limit: value of the budget.
    """
    unit, scale = time_scale(max(seconds for curve in (*drawn, *points) for seconds in curve.seconds))
    figure, axes = canvas(f"elapsed time ({unit})", title)
    for curve in drawn:
        colour = block_colour(blocks[curve.phase])
        faint = 0.45 if points else 1.0
        times = np.array(curve.seconds) / scale
        axes.plot(times, curve.values, color=colour, alpha=faint, linewidth=1.4, gid=TIP + curve.phase)
    for curve in points:
        colour = block_colour(blocks[curve.phase])
        times = np.array(curve.seconds) / scale
        axes.plot(times, curve.values, "o-", color=colour, markersize=4, gid=f"{TIP}{curve.phase}, validation")
    if limit is not None:
        axes.set_ylim(0, 1.12 * max(limit, *(max(curve.values) for curve in drawn)))
        limit_line(axes, limit, "budget")
    name_spans(figure, axes, drawn or points, blocks, scale)
    return inline(figure, label)


@mpl.rc_context(STYLE)
def caches(phases: Sequence[PhaseRecord], label: str) -> str:
    """Bytes of activation cache that every phase wrote."""
    figure, axes = canvas("cache written (MB)", "", height=max(1.4, 0.6 + 0.38 * len(phases)))
    for row, phase in enumerate(phases):
        size, words = phase.cache_bytes / MB, format_bytes(phase.cache_bytes)
        axes.barh(row, size, 0.6, color=PALETTE["measured"], gid=f"{TIP}{phase.name}: {words}")
        write_at(axes, words if phase.cache_bytes else "none", (size, row), (4, 0), va="center_baseline")
    axes.set_yticks(range(len(phases)), [phase_label(phase.name) for phase in phases], color=PALETTE["ink"])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.22)
    return inline(figure, label)
