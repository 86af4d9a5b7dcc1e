"""The sections of a run's page about loss, accuracy, exits and classes. Imported only to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from snugfit._core.record import ExitRecord, Record
from snugfit._quantities import format_seconds
from snugfit._report import canvas
from snugfit._report.canvas import BLOCK_COLOURS, PALETTE, STYLE, TIP
from snugfit._report.formatting import count, metric_of, percent, shorten
from snugfit._report.intervals import phase_blocks
from snugfit._report.markup import html
from snugfit._report.metrics import Curve, MetricRow, curves


def over_time(record: Record, rows: Sequence[MetricRow]) -> str:
    """Loss and accuracy over the run's elapsed time."""
    if not rows:
        return html.absent("There is no metrics.csv in the run folder, so nothing can be shown over time.")
    blocks, in_blocks = phase_blocks(record, rows), not record.intervals
    parts = []
    if loss := curves(rows, "loss"):
        svg = draw_over_time(loss, "training loss", "Training loss over time", blocks=blocks)
        title = f"Training loss went from {loss[0].values[0]:.2f} to {loss[-1].values[-1]:.2f}"
        caption = "Each point is a mean over a stretch of steps."
        caption += " Every block has a loss of its own." if len(loss) > 1 and in_blocks else ""
        parts.append(html.figure(title, svg, caption))
    training = curves(rows, "accuracy", scale=100)
    validation = curves(rows, "val_accuracy", epochs=True, scale=100)
    if training or validation:
        metric = metric_of(record)
        label = f"{'Training and validation' if training else 'Validation'} {metric} over time"
        svg = draw_over_time(training, f"{metric} (%)", label, blocks=blocks, points=validation)
        title, caption = _accuracy_words(training, validation, metric, in_blocks=in_blocks)
        parts.append(html.figure(title, svg, caption))
    return html.grid(parts) if parts else html.absent("metrics.csv holds no losses or accuracies over time.")


def _accuracy_words(
    training: Sequence[Curve], validation: Sequence[Curve], metric: str, *, in_blocks: bool
) -> tuple[str, str]:
    caption = "Thin lines: training accuracy, a mean over a stretch of steps. " if training else ""
    if not validation:
        return "Accuracy on training images", caption.strip()
    best, when = max((v, s) for curve in validation for v, s in zip(curve.values, curve.seconds, strict=True))
    title = f"Validation {metric} reached {best:.1f} % after {format_seconds(when)}"
    whose = ", of the block's last exit" if in_blocks and len(validation) > 1 else ""
    return title, f"{caption}Points: validation {metric} after an epoch{whose}."


@mpl.rc_context(STYLE)
def draw_over_time(
    drawn: Sequence[Curve],
    title: str,
    label: str,
    *,
    blocks: Mapping[str, int],
    points: Sequence[Curve] = (),
    limit: float | None = None,
) -> str:
    """Curves over the elapsed time of the run, one per phase, coloured by the phase's index in ``blocks``.

    ``title`` names the value axis, and ``label`` is for screen readers. ``points`` are drawn as points on a line
    (validation accuracy), and the budget ``limit`` as a dashed line.
    """
    longest = max(seconds for curve in (*drawn, *points) for seconds in curve.seconds)
    unit, scale = ("h", 3600.0) if longest >= 3 * 3600 else ("min", 60.0) if longest >= 180 else ("s", 1.0)
    figure, axes = canvas.new_figure(f"elapsed time ({unit})", title)
    for curve in drawn:
        times, colour = np.array(curve.seconds) / scale, canvas.block_colour(blocks[curve.phase])
        faint = 0.45 if points else 1.0
        axes.plot(times, curve.values, color=colour, alpha=faint, linewidth=1.4, gid=TIP + curve.phase)
    for curve in points:
        times, colour = np.array(curve.seconds) / scale, canvas.block_colour(blocks[curve.phase])
        axes.plot(times, curve.values, "o-", color=colour, markersize=4, gid=f"{TIP}{curve.phase}, validation")
    if limit is not None:
        axes.set_ylim(0, 1.12 * max(limit, *(max(curve.values) for curve in drawn)))
        canvas.limit_line(axes, limit, "budget")
    named = drawn or points
    if len(named) <= BLOCK_COLOURS:
        word = "interval" if all(curve.phase.startswith("interval ") for curve in named) else "block"
        canvas.block_legend(figure, {blocks[curve.phase] for curve in named}, word)
    else:
        _number_blocks(axes, named, blocks, scale)
    return canvas.inline(figure, label)


def _number_blocks(axes: Axes, drawn: Sequence[Curve], blocks: Mapping[str, int], scale: float) -> None:
    """Write the number of every block along the top."""
    for curve in drawn:
        middle = (curve.seconds[0] + curve.seconds[-1]) / 2 / scale
        block = blocks[curve.phase]
        look = {"ha": "center", "fontsize": 9, "color": canvas.block_colour(block)}
        canvas.write_at(axes, str(block + 1), (middle, 1), (0, -8), xycoords=axes.get_xaxis_transform(), **look)


def exits(record: Record) -> str:
    """Accuracy of every exit, against its depth and its size; nothing for a network without exits."""
    if not record.exits:
        return ""
    chosen = record.exit.get("index") if record.exit else None
    frontier = pareto(record.exits)
    marked = next((i for i, e in enumerate(record.exits) if e.index == chosen), None)
    rows = [
        (e.index + 1, e.unit, percent(e.val_accuracy), f"{e.parameters:,}", "yes" if e in frontier else "")
        for e in record.exits
    ]
    head = ("unit", "name", "validation accuracy", "parameters", "on the frontier")
    listing = html.table(head, rows, marked, words=2)
    return html.grid(_exit_figures(record, frontier, chosen)) + html.details("All exits", listing)


def pareto(points: Sequence[ExitRecord]) -> list[ExitRecord]:
    """Exits that no exit of the same or fewer parameters beats, smallest first."""
    frontier: list[ExitRecord] = []
    for point in sorted(points, key=lambda e: (e.parameters, -e.val_accuracy)):
        if not frontier or point.val_accuracy > frontier[-1].val_accuracy:
            frontier.append(point)
    return frontier


def _exit_figures(record: Record, frontier: list[ExitRecord], chosen: int | None) -> list[str]:
    points = record.exits
    best = max(points, key=lambda e: e.val_accuracy)
    mine = next((e for e in points if e.index == chosen), best)
    last = max(points, key=lambda e: e.index)
    of = record.exit["of"] if record.exit else last.index + 1
    if mine.index == of - 1:
        title = f"The whole network is the best exit: {percent(mine.val_accuracy)} on validation"
    else:
        gap = 100 * (best.val_accuracy - mine.val_accuracy)
        rest = f"no other exit gains more than {gap:.1f} points"
        if math.isclose(gap, 0, abs_tol=0.005):
            rest = "no exit does better"
        title = f"Unit {mine.index + 1} of {of} is the exit: {percent(mine.val_accuracy)}, and {rest}"
    caption = (
        "Every unit has a classifier of its own. The diamond is the exit that was chosen, on validation images alone."
    )
    depth = html.figure(title, _draw_exits(points, chosen), caption)
    factor = (record.parameters.get("full") or last.parameters) / max(mine.parameters, 1)
    size = f"{factor:.1f} times smaller than the whole network" if factor > 1.05 else "the whole network"
    title = f"The exit has {count(mine.parameters)} parameters, {size}"
    caption = "Dashed: the frontier, the best accuracy for a number of parameters. Sizes count the exit's classifier."
    return [depth, html.figure(title, _draw_frontier(points, frontier, chosen), caption)]


@mpl.rc_context(STYLE)
def _draw_exits(exits: Sequence[ExitRecord], chosen: int | None) -> str:
    """Validation accuracy of the exit after every unit (Figure 10 of NeuroFlux)."""
    figure, axes = canvas.new_figure("exit after unit", "validation accuracy (%)", grid="y")
    numbers, accuracy = [e.index + 1 for e in exits], [100 * e.val_accuracy for e in exits]
    axes.plot(numbers, accuracy, color=PALETTE["measured"])
    for point, number, value in zip(exits, numbers, accuracy, strict=True):
        _exit_point(axes, number, value, point, chosen)
    canvas.unit_axis(axes, max(numbers))
    axes.margins(y=0.12)
    return canvas.inline(figure, "Validation accuracy of the exit after every unit")


@mpl.rc_context(STYLE)
def _draw_frontier(exits: Sequence[ExitRecord], frontier: Sequence[ExitRecord], chosen: int | None) -> str:
    """Validation accuracy against parameters, with the line of exits that nothing smaller beats."""
    figure, axes = canvas.new_figure("parameters of the exit model", "validation accuracy (%)")
    sizes = [e.parameters for e in frontier] + [max(e.parameters for e in exits)]
    best = [100 * e.val_accuracy for e in (*frontier, frontier[-1])]
    axes.step(sizes, best, where="post", color=PALETTE["muted"], linewidth=1.2, linestyle=(0, (3, 2)))
    for point in exits:
        _exit_point(axes, point.parameters, 100 * point.val_accuracy, point, chosen)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)
    return canvas.inline(figure, "Validation accuracy against parameters")


def _exit_point(axes: Axes, x: float, y: float, point: ExitRecord, chosen: int | None) -> None:
    """One exit; the chosen one is large, has its own colour, and is named."""
    mine = point.index == chosen
    tip = f"unit {point.index + 1}, {point.unit}: {percent(point.val_accuracy)}, {count(point.parameters)} parameters"
    marker, colour, size, order = ("D", PALETTE["chosen"], 9, 4) if mine else ("o", PALETTE["measured"], 5, 3)
    axes.plot(x, y, marker, color=colour, markersize=size, zorder=order, gid=TIP + tip)
    if mine:
        canvas.write_at(axes, f"unit {point.index + 1}", (x, y), (0, 9), ha="center", color=colour, fontweight="bold")


def classes(record: Record) -> str:
    """Confusion matrix and the pairs of classes that are confused most."""
    matrix = record.confusion
    if not matrix or any(len(row) != len(matrix) for row in matrix):
        return html.absent("The record holds no confusion matrix.")
    names = record.class_names if len(record.class_names) == len(matrix) else tuple(map(str, range(len(matrix))))
    pairs = confused_pairs(matrix, names)
    title = "No image was put into a wrong class"
    if pairs:
        title = f"{pairs[0][0]} is mistaken for {pairs[0][1]} most often: {percent(pairs[0][2])} of its images"
    caption = "Rows are true classes, columns predicted ones; figures are per cent of the row, stronger is more."
    parts = [html.figure(title, _draw_confusion(matrix, names), caption)]
    if pairs:
        rows = [(true, taken, percent(share), number) for true, taken, share, number in pairs[:10]]
        listing = html.table(("true", "predicted", "of its class", "images"), rows, words=2)
        parts.append(html.card("Most frequent mistakes", listing))
    return html.grid(parts)


def confused_pairs(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> list[tuple[str, str, float, int]]:
    """True class, predicted class, share of the true class and images, most frequent share first."""
    found = [
        (names[row], names[column], number / max(sum(counts), 1), number)
        for row, counts in enumerate(matrix)
        for column, number in enumerate(counts)
        if row != column and number
    ]
    return sorted(found, key=lambda pair: -pair[2])


@mpl.rc_context(STYLE)
def _draw_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Confusion matrix, every row as shares of its true class; no tick labels beyond 20 classes."""
    size = len(matrix)
    figure, axes = canvas.new_figure("predicted class", "true class", height=4.4)
    counts = np.asarray(matrix, dtype=float)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    red, green, blue = (int(PALETTE["measured"][i : i + 2], 16) / 255 for i in (1, 3, 5))
    axes.imshow(np.dstack([np.full_like(share, c) for c in (red, green, blue)] + [share**0.7]), interpolation="none")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    shown, short = range(size if size <= 20 else 0), [shorten(name, 14) for name in names if size <= 20]
    axes.set_xticks(shown, short, rotation=90)
    axes.set_yticks(shown, short)
    if size <= 12:
        for row, column in np.argwhere(share >= 0.005):
            colour = "#ffffff" if share[row, column] > 0.45 else PALETTE["ink"]
            words = f"{100 * share[row, column]:.0f}"
            axes.text(column, row, words, ha="center", va="center_baseline", fontsize=9, color=colour)
    return canvas.inline(figure, "Confusion matrix")
