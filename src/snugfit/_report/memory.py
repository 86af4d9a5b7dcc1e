"""The sections of a run's page about memory and caches. Imported only to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from snugfit._core.profile import ProbeLine
from snugfit._core.record import PhaseRecord, Record
from snugfit._core.serial import from_data
from snugfit._quantities import MB, format_bytes
from snugfit._report import canvas
from snugfit._report.canvas import PALETTE, PREDICTED_MEASURED, STYLE, TIP
from snugfit._report.formatting import phase_label
from snugfit._report.intervals import phase_blocks, training_phases
from snugfit._report.markup import html
from snugfit._report.metrics import MetricRow, curves
from snugfit._report.results import draw_over_time

MOST_UNITS_BATCH = 65536
MOST_ROWS = 16
"""Up to this many phases have a figure of full height, with names and numbers at every bar."""


def memory(record: Record, rows: Sequence[MetricRow]) -> str:
    """Budget against prediction and measurement, the memory model, and the batch sizes that follow from it."""
    parts = [_peaks(record), _memory_over_time(record, rows), *_memory_model(record)]
    return html.grid(filter(None, parts)) or html.absent("The record holds no phases and no memory model.")


def caches(record: Record) -> str:
    """Bytes of activation cache per phase; empty for a run without caches."""
    phases = training_phases(record)
    if not any(phase.cache_bytes for phase in phases):
        return ""
    largest = max(phases, key=lambda phase: phase.cache_bytes)
    title = f"The largest activation cache is {format_bytes(largest.cache_bytes)}, after {phase_label(largest.name)}"
    caption = "The next block trains from it. The cache of two blocks before is deleted then, so at most two exist."
    return html.figure(title, _draw_caches(phases), caption)


def _peaks(record: Record) -> str:
    if not record.phases:
        return ""
    budget = record.budget.get("memory_bytes")
    hungriest = max(record.phases, key=lambda phase: phase.measured_peak_bytes)
    peak = format_bytes(hungriest.measured_peak_bytes)
    if budget is None:
        title = f"{phase_label(hungriest.name)} needed the most memory: {peak}"
    elif hungriest.measured_peak_bytes <= budget:
        title = f"Every phase stayed within the budget of {format_bytes(budget)}"
    else:
        excess = format_bytes(hungriest.measured_peak_bytes - budget)
        title = f"{phase_label(hungriest.name)} exceeded the budget by {excess}"
    caption = f"Peak memory above the baseline, as predicted before training and as measured. Highest: {peak}."
    if missed := [phase_label(phase.name) for phase in record.phases if phase.exceeded]:
        caption += f" Above their own prediction: {', '.join(missed)}."
    return html.figure(title, _draw_peaks(record.phases, budget), caption)


@mpl.rc_context(STYLE)
def _draw_peaks(phases: Sequence[PhaseRecord], budget: int | None) -> str:
    """Predicted and measured peak of every phase against the budget (this run's Figure 5 of NeuroFlux)."""
    every = -(-len(phases) // MOST_ROWS)
    figure, axes = canvas.new_figure("peak memory (MB)", "", max(1.6, 0.9 + 0.42 * len(phases) / every), grid="x")
    sizes = [(phase.predicted_peak_bytes / MB, phase.measured_peak_bytes / MB) for phase in phases]
    right = 1.04 * max((budget or 0) / MB, *map(max, sizes))
    for row, (phase, (predicted, measured)) in enumerate(zip(phases, sizes, strict=True)):
        tip = f"{TIP}{phase.name}: predicted {predicted:.1f} MB, measured {measured:.1f} MB"
        axes.barh(row, predicted, 0.72, color=PALETTE["predicted"], gid=tip)
        axes.barh(row, measured, 0.42, color=PALETTE["measured"], gid=tip)
        if every > 1:
            continue
        x, offset, side, colour = (max(predicted, measured), 4, "left", "ink")
        if measured > 0.15 * right:
            x, offset, side, colour = (measured, -4, "right", "card")
        look = {"ha": side, "va": "center_baseline", "fontsize": 9, "color": PALETTE[colour]}
        canvas.write_at(axes, f"{measured:.1f}", (x, row), (offset, 0), **look)
    shown = range(0, len(phases), every)
    axes.set_yticks(shown, [phase_label(phases[row].name) for row in shown], color=PALETTE["ink"])
    axes.set_ylim(len(phases) - 0.5, -0.5)
    entries = list(PREDICTED_MEASURED)
    if budget is not None:
        canvas.budget_line(axes, budget / MB, vertical=True)
        entries.append((f"budget {format_bytes(budget)}", PALETTE["budget"], "--"))
    axes.set_xlim(0, right)
    canvas.legend(figure, entries)
    return canvas.inline(figure, "Peak memory per phase against the budget")


def _memory_over_time(record: Record, rows: Sequence[MetricRow]) -> str:
    drawn = curves(rows, "current_bytes", scale=1 / MB)
    if not drawn:
        return ""
    budget = record.budget.get("memory_bytes")
    top = max(value for curve in drawn for value in curve.values)
    share = f", {100 * top * MB / budget:.0f} % of the budget" if budget else ""
    limit, blocks = budget / MB if budget else None, phase_blocks(record, rows)
    words = ("memory in use after a step (MB)", "Memory in use over time")
    svg = draw_over_time(drawn, *words, blocks=blocks, limit=limit)
    caption = "Memory held between steps; the peaks within a step are in the figure by phase."
    return html.figure(f"Between steps the run held at most {top:.1f} MB{share}", svg, caption)


def _memory_model(record: Record) -> list[str]:
    stored: dict[str, Any] = record.profile.get("lines") or {}
    lines = {name[5:]: from_data(ProbeLine, line) for name, line in stored.items() if name.startswith("unit:")}
    if not lines:
        return []
    budget = record.budget.get("memory_bytes")
    available = budget - record.profile.get("base_bytes", 0) if budget else None
    phases = training_phases(record)
    home = {unit: index for index, phase in enumerate(phases) for unit in phase.units}
    points = [point.batch for line in lines.values() for point in line.points]
    largest = max([*points, *(phase.batch_size for phase in phases), 8])
    names = list(lines)
    hungriest = max(names, key=lambda unit: lines[unit].sample_bytes)
    title = f"Memory grows with the batch in straight lines; unit {names.index(hungriest) + 1} grows fastest"
    caption = "Points are measured; lines are the upper bounds fitted to them, numbered by unit. "
    caption += f"{hungriest}: {format_bytes(lines[hungriest].sample_bytes)} per sample."
    parts = [html.figure(title, draw_memory_lines(lines, home, available, largest), caption)]
    if available is not None and phases:
        parts.append(_batches(record, lines, home, available))
    return parts


@mpl.rc_context(STYLE)
def draw_memory_lines(
    lines: Mapping[str, ProbeLine], blocks: Mapping[str, int], available: float | None, largest: int
) -> str:
    """The memory model: every unit's line over batch size with its measured points (Figure 8 of NeuroFlux).

    ``blocks`` is the index of the block that each unit trained in, ``available`` the bytes that a unit may use, and
    ``largest`` the right end of the batch axis.
    """
    figure, axes = canvas.new_figure("batch size", "peak memory of one step (MB)", height=3.4)
    ends: list[tuple[float, float, int, str]] = []
    for number, (unit, line) in enumerate(lines.items(), 1):
        colour = canvas.block_colour(blocks[unit]) if unit in blocks else PALETTE["muted"]
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
    _label_ends(axes, ends, largest)
    if available is not None and available / MB <= axes.get_ylim()[1]:
        canvas.limit_line(axes, available / MB, "budget")
    canvas.block_legend(figure, {blocks[unit] for unit in lines if unit in blocks})
    return canvas.inline(figure, "Memory of every unit over batch size")


def _label_ends(axes: Axes, lines: Sequence[tuple[float, float, int, str]], x: float) -> None:
    """Number straight lines at their end on the right or upper edge of the axes, the steepest first.

    A line is its value at 0, its value at ``x``, number and colour. A number that would cover another is left out.
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
            canvas.write_at(axes, str(number), (at[0] * x, at[1] * top), offset, **look)


def _batches(record: Record, lines: dict[str, ProbeLine], home: dict[str, int], available: float) -> str:
    phases = training_phases(record)
    fits = [line.largest_batch(available, MOST_UNITS_BATCH) for line in lines.values()]
    blocks = [home.get(unit) for unit in lines]
    used = [None if block is None else phases[block].batch_size for block in blocks]
    smallest, largest = min(p.batch_size for p in phases), max(p.batch_size for p in phases)
    title = f"Blocks train with batches from {smallest} to {largest}"
    if smallest == largest:
        title = f"Everything trains with batches of {smallest}"
    caption = "Bars: the largest batch with which the unit alone would fit the budget. Lines: what its block used."
    return html.figure(title, _draw_batches(fits, used, blocks, record.workload.get("batch_limit")), caption)


@mpl.rc_context(STYLE)
def _draw_batches(
    largest: Sequence[int], used: Sequence[int | None], blocks: Sequence[int | None], limit: int | None
) -> str:
    """Largest batch of every unit within the budget, and the batch its block used (Figure 6 of NeuroFlux).

    Batch and block are None for units that did not train.
    """
    figure, axes = canvas.new_figure("unit", "batch size", grid="y")
    numbers = np.arange(1, len(largest) + 1)
    for number, size, batch, block in zip(numbers, largest, used, blocks, strict=True):
        tip = f"{TIP}unit {number}: at most {size}" + (f", trained with {batch}" if batch else "")
        axes.bar(number, max(size, 0.9), 0.8, color=PALETTE["predicted"], gid=tip)
        if batch and block is not None:
            axes.plot([number - 0.5, number + 0.5], [batch] * 2, color=canvas.block_colour(block), linewidth=3, gid=tip)
    axes.set_yscale("log", base=2)
    axes.set_ylim(bottom=0.5 if min(largest) < 2 else 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    canvas.unit_axis(axes, len(largest))
    if limit:
        canvas.limit_line(axes, limit, f"batch limit {limit}", left=True)
    shown = sorted({block for block in blocks if block is not None})
    entries = [("fits", PALETTE["predicted"], "s")]
    entries += [(f"block {block + 1}", canvas.block_colour(block), "-") for block in shown] if len(shown) <= 4 else []
    canvas.legend(figure, entries)
    return canvas.inline(figure, "Largest batch per unit and batch size per block")


@mpl.rc_context(STYLE)
def _draw_caches(phases: Sequence[PhaseRecord]) -> str:
    """Bytes of activation cache that every phase wrote."""
    figure, axes = canvas.new_figure("cache written (MB)", "", max(1.4, 0.6 + 0.38 * len(phases)), grid="x")
    for row, phase in enumerate(phases):
        size, words = phase.cache_bytes / MB, format_bytes(phase.cache_bytes)
        axes.barh(row, size, 0.6, color=PALETTE["measured"], gid=f"{TIP}{phase.name}: {words}")
        canvas.write_at(axes, words if phase.cache_bytes else "none", (size, row), (4, 0), va="center_baseline")
    axes.set_yticks(range(len(phases)), [phase_label(phase.name) for phase in phases], color=PALETTE["ink"])
    axes.invert_yaxis()
    axes.margins(x=0.22)
    return canvas.inline(figure, "Activation cache written per block")
