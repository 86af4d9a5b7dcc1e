"""Section on the selection of tensors: which trained when, what that saved, and how well it was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from snugfit._core.record import IntervalRecord, Record
from snugfit._quantities import format_bytes, format_seconds
from snugfit._report import canvas
from snugfit._report.canvas import PALETTE, STYLE, TIP, WIDTH
from snugfit._report.formatting import NONE, count, percent, share
from snugfit._report.intervals import StepTime, Tensors, epoch_words, phase_of, step_time, tensors_of
from snugfit._report.markup import html

LEAST_CELLS = 30
"""The figure has space for at least this many tensors."""
MOST_ROWS = 14
"""Up to this many intervals have numbers next to their row; of more, every second one, and so on."""
LEAST_BARS = 4
"""The figure has space for at least this many bars, so that a few bars are not too wide."""
_FLOPS = ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))
HEAD = (
    *("interval", "epochs", "tensors", "parameters", "rho predicted", "rho measured"),
    *("step predicted", "step measured", "peak predicted", "peak measured", "selection", "profiled again"),
)


def body(record: Record) -> str:
    """Figures and a table; empty for a record without intervals that trained."""
    intervals = [each for each in record.intervals if each.epochs]
    if not intervals:
        return ""
    tensors = tensors_of(record)
    chart = _selected(intervals, tensors, str(record.settings.get("scheme", record.strategy)))
    figures = html.grid(filter(None, (chart, _flops(record, intervals), _steps(record, intervals))))
    return figures + html.below(html.table(HEAD, _rows(record, tensors)))


def _selected(intervals: Sequence[IntervalRecord], tensors: Tensors, scheme: str) -> str:
    total, sizes = len(tensors.names), [len(each.tensors) for each in intervals]
    some = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(max(sizes))
    title = f"{some} of {total} tensors train at a time" if max(sizes) < total else f"All {total} tensors train"
    if len(intervals) == 1:
        caption = f"The scheme {scheme} makes one selection."
    else:
        caption = f"The selection is repeated during training: {_moved(intervals)}."
    parameters = [n for each in intervals if (n := tensors.counted(each.tensors)) is not None]
    if parameters:
        whole = sum(tensors.parameters.values())
        most = max(parameters)
        caption += (
            f" At most {count(most)} of {count(whole)} parameters ({percent(most / max(whole, 1))}) train at once."
        )
    svg = selections(intervals, tensors)
    return html.figure(title, svg, f"{caption} Point at a column for its name.", wide=True)


def _moved(intervals: Sequence[IntervalRecord]) -> str:
    """How much consecutive selections differ."""
    changes = [len(set(now.tensors) ^ set(before.tensors)) for before, now in pairwise(intervals)]
    if not any(changes):
        return "it stayed the same throughout"
    few, many = min(changes), max(changes)
    return f"from one to the next {few if few == many else f'{few} to {many}'} tensors came or went"


def _flops(record: Record, intervals: Sequence[IntervalRecord]) -> str:
    images, full = record.workload.get("train_count"), max(each.full_macs for each in intervals)
    if not images or not full:
        return ""
    epochs = sum(each.epochs for each in intervals)
    mean = sum(each.macs * each.epochs for each in intervals) / sum(each.full_macs * each.epochs for each in intervals)
    title = f"An epoch takes {percent(mean)} of the operations of full training"
    caption = f"Two per multiply-accumulate of a step, for {images:,} images in each of {epochs} epochs; "
    caption += "ranking is not counted."
    return html.figure(title, flops(intervals, images), caption)


def _steps(record: Record, intervals: Sequence[IntervalRecord]) -> str:
    step, ratio = step_time(intervals), record.budget.get("time_ratio")
    if step is None:
        return ""
    svg = step_times(intervals, ratio)
    caption = "A full step trains everything, with torch's own operators; it was measured before training."
    return html.figure(_step_title(step, ratio), svg, caption)


def _step_title(step: StepTime, ratio: float | None) -> str:
    if step.measured is None:
        return f"A step is predicted to take {share(step.predicted / step.full)} of a full one"
    title = (
        f"A step took {share(step.measured / step.full)} of a full one, predicted {share(step.predicted / step.full)}"
    )
    if ratio is None:
        return title
    return f"{title}: {'over' if step.over(ratio) else 'within'} rho {ratio:g}"


def _rows(record: Record, tensors: Tensors) -> list[tuple[Any, ...]]:
    rows = []
    for index, each in enumerate(record.intervals):
        phase, parameters = phase_of(record, index), tensors.counted(each.tensors)
        rows.append(
            (
                *(index + 1, epoch_words(each), len(each.tensors), NONE if parameters is None else count(parameters)),
                *(_ratio(seconds, each) for seconds in (each.predicted_seconds, each.measured_seconds)),
                format_seconds(each.predicted_seconds),
                format_seconds(each.measured_seconds) if each.measured_seconds else NONE,
                format_bytes(each.predicted_peak_bytes),
                format_bytes(phase.measured_peak_bytes) if phase else NONE,
                *(format_seconds(each.selection_seconds), "yes" if each.profiled else "no"),
            )
        )
    return rows


def _ratio(seconds: float, interval: IntervalRecord) -> str:
    return share(seconds / interval.full_seconds) if seconds and interval.full_seconds else NONE


@mpl.rc_context(STYLE)
def selections(intervals: Sequence[IntervalRecord], tensors: Tensors) -> str:
    """Which tensors, in columns, each interval trains, in rows (ElasticTrainer, Figure 21)."""
    rows, columns = len(intervals), len(tensors.names)
    every = -(-rows // MOST_ROWS)
    figure, axes = canvas.new_figure("", "epochs", 1.15 + 0.27 * rows / every, 2.4 * WIDTH)
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
            canvas.write_at(axes, _sum(interval, mine, tensors), (columns + 0.5, row), (6, 0), **_AT_END_OF_ROW)
    shown = range(0, rows, every)
    axes.set_yticks(shown, [epoch_words(intervals[row]) for row in shown], color=PALETTE["ink"])
    axes.set(xlim=(0.5, max(columns, LEAST_CELLS) + 0.5), ylim=(rows - 0.5, -0.5))
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    canvas.whole_ticks(axes, columns)
    entries = [("trains", PALETTE["measured"], "s"), ("classifier, always trains", PALETTE["chosen"], "s")]
    canvas.legend(figure, [*entries, ("frozen", PALETTE["grid"], "s")])
    return canvas.inline(figure, "Tensors that train, by interval")


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
def flops(intervals: Sequence[IntervalRecord], images: int) -> str:
    """Floating-point operations of every epoch, with those of full training as a line (ElasticTrainer, Figure 18).

    ``images`` are the training images of an epoch.
    """
    full = 2.0 * max(each.full_macs for each in intervals) * images
    scale, unit = next(((scale, unit) for scale, unit in _FLOPS if full >= scale), (1e3, "kFLOPs"))
    figure, axes = canvas.new_figure("epoch", f"operations per epoch ({unit})", grid="y")
    for index, interval in enumerate(intervals):
        value = 2 * interval.macs * images / scale
        ratio = share(interval.macs / max(interval.full_macs, 1))
        tip = f"{TIP}interval {index + 1}, epochs {epoch_words(interval)}: {value:.3g} {unit}, {ratio} of full training"
        for epoch in range(interval.first_epoch + 1, interval.first_epoch + interval.epochs + 1):
            axes.bar(epoch, value, 0.82, color=PALETTE["measured"], gid=tip)
    canvas.limit_line(axes, full / scale, "full training", left=True)
    axes.set_ylim(0, 1.16 * max(full, *(2.0 * each.macs * images for each in intervals)) / scale)
    last = max(each.first_epoch + each.epochs for each in intervals)
    axes.set_xlim(0.4, max(last, LEAST_BARS) + 0.6)
    canvas.whole_ticks(axes, last)
    return canvas.inline(figure, "Operations per epoch")


@mpl.rc_context(STYLE)
def step_times(intervals: Sequence[IntervalRecord], ratio: float | None) -> str:
    """Predicted and measured step time of every interval, a full step's as a line, and the budget rho's share of it."""
    full = max(each.full_seconds for each in intervals)
    longest = max(full, *(max(each.predicted_seconds, each.measured_seconds) for each in intervals))
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
    figure, axes = canvas.new_figure("interval", f"time of a step ({unit})", grid="y")
    for number, interval in enumerate(intervals, 1):
        predicted, measured = interval.predicted_seconds, interval.measured_seconds
        words = format_seconds(measured) if measured else "none"
        tip = f"{TIP}interval {number}: predicted {format_seconds(predicted)}, measured {words}"
        axes.bar(number, predicted / scale, 0.72, color=PALETTE["predicted"], gid=tip)
        axes.bar(number, measured / scale, 0.42, color=PALETTE["measured"], gid=tip)
    canvas.limit_line(axes, full / scale, "full step", left=True)
    entries = [("predicted", PALETTE["predicted"], "s"), ("measured, median", PALETTE["measured"], "s")]
    if ratio is not None:
        canvas.budget_line(axes, ratio * full / scale)
        entries.append((f"rho {ratio:g}", PALETTE["budget"], "--"))
    axes.set_ylim(0, 1.16 * longest / scale)
    axes.set_xlim(0.4, max(len(intervals), LEAST_BARS) + 0.6)
    canvas.whole_ticks(axes, len(intervals))
    canvas.legend(figure, entries)
    return canvas.inline(figure, "Time of a training step by interval")
