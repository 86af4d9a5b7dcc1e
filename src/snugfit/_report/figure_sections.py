"""Sections of a run's page: figures under titles that state the finding. Imported only to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from snugfit._core.profile import ProbeLine
from snugfit._core.record import ExitRecord, PhaseRecord, Record
from snugfit._core.serial import from_data
from snugfit._quantities import format_bytes, format_seconds
from snugfit._report import run_figures
from snugfit._report.formatting import MB, count, metric_of, percent, phase_label
from snugfit._report.markup import html
from snugfit._report.metrics import Curve, MetricRow, curves

MOST_UNITS_BATCH = 65536


def memory(record: Record, rows: Sequence[MetricRow]) -> str:
    """Budget against prediction and measurement, the memory model, and the batch sizes that follow from it."""
    parts = [_peaks(record), _memory_over_time(record, rows), *_memory_model(record)]
    return html.grid(filter(None, parts)) or html.absent("The record holds no phases and no memory model.")


def exits(record: Record) -> str:
    """Accuracy of every exit, against its depth and its size."""
    if not record.exits:
        return html.absent(
            f"The strategy {record.strategy} trains one whole network: there are no exits to choose from."
        )
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


def over_time(record: Record, rows: Sequence[MetricRow]) -> str:
    """Loss and accuracy over the run's elapsed time."""
    if not rows:
        return html.absent("There is no metrics.csv in the run folder, so nothing can be shown over time.")
    blocks = phase_blocks(record, rows)
    parts = []
    if loss := curves(rows, "loss"):
        first, last = loss[0].values[0], loss[-1].values[-1]
        svg = run_figures.over_time(loss, "training loss", "Training loss over time", blocks=blocks)
        title = f"Training loss went from {first:.2f} to {last:.2f}"
        caption = "Each point is a mean over a stretch of steps."
        caption += " Every block has a loss of its own." if len(loss) > 1 and _in_blocks(record) else ""
        parts.append(html.figure(title, svg, caption))
    training, validation = _shares(rows, "accuracy"), _shares(rows, "val_accuracy", epochs=True)
    if training or validation:
        metric = metric_of(record)
        parts_shown = f"Training and validation {metric}" if training else f"Validation {metric}"
        svg = run_figures.over_time(
            training, f"{metric} (%)", f"{parts_shown} over time", blocks=blocks, points=validation
        )
        title, caption = _accuracy_words(training, validation, metric, blocks=_in_blocks(record))
        parts.append(html.figure(title, svg, caption))
    return html.grid(parts) if parts else html.absent("metrics.csv holds no losses or accuracies over time.")


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
    parts = [html.figure(title, run_figures.confusion(matrix, names, "Confusion matrix"), caption)]
    if pairs:
        rows = [(true, taken, percent(share), number) for true, taken, share, number in pairs[:10]]
        listing = html.table(("true", "predicted", "of its class", "images"), rows, words=2)
        parts.append(html.card("Most frequent mistakes", listing))
    return html.grid(parts)


def caches(record: Record) -> str:
    """Bytes of activation cache per phase; empty for a run without caches."""
    phases = _training(record)
    if not any(phase.cache_bytes for phase in phases):
        return ""
    largest = max(phases, key=lambda phase: phase.cache_bytes)
    title = f"The largest activation cache is {format_bytes(largest.cache_bytes)}, after {phase_label(largest.name)}"
    caption = "The next block trains from it. The cache of two blocks before is deleted then, so at most two exist."
    return html.figure(title, run_figures.caches(phases, "Activation cache written per block"), caption)


def phase_blocks(record: Record, rows: Sequence[MetricRow]) -> dict[str, int]:
    """Number every training phase from 0, in order; phases that only ``metrics.csv`` knows come last."""
    blocks = {phase.name: index for index, phase in enumerate(_training(record))}
    for row in rows:
        blocks.setdefault(row.phase, len(blocks))
    return blocks


def pareto(points: Sequence[ExitRecord]) -> list[ExitRecord]:
    """Exits that no exit of the same or fewer parameters beats, smallest first."""
    frontier: list[ExitRecord] = []
    for point in sorted(points, key=lambda e: (e.parameters, -e.val_accuracy)):
        if not frontier or point.val_accuracy > frontier[-1].val_accuracy:
            frontier.append(point)
    return frontier


def confused_pairs(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> list[tuple[str, str, float, int]]:
    """True class, predicted class, share of the true class and images, most frequent share first."""
    found = [
        (names[row], names[column], number / max(sum(counts), 1), number)
        for row, counts in enumerate(matrix)
        for column, number in enumerate(counts)
        if row != column and number
    ]
    return sorted(found, key=lambda pair: -pair[2])


def unit_lines(record: Record) -> dict[str, ProbeLine]:
    """The memory model's lines by unit name, in chain order."""
    lines: dict[str, Any] = record.profile.get("lines") or {}
    return {name[5:]: from_data(ProbeLine, line) for name, line in lines.items() if name.startswith("unit:")}


def _training(record: Record) -> list[PhaseRecord]:
    return [phase for phase in record.phases if phase.units] or list(record.phases)


def _in_blocks(record: Record) -> bool:
    """Whether phases train different parts of the network."""
    return not record.intervals


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
    svg = run_figures.peaks(record.phases, budget, "Peak memory per phase against the budget")
    return html.figure(title, svg, caption)


def _memory_over_time(record: Record, rows: Sequence[MetricRow]) -> str:
    drawn = curves(rows, "current_bytes")
    if not drawn:
        return ""
    for curve in drawn:
        curve.values[:] = [value / MB for value in curve.values]
    budget = record.budget.get("memory_bytes")
    top = max(value for curve in drawn for value in curve.values)
    share = f", {100 * top * MB / budget:.0f} % of the budget" if budget else ""
    limit, blocks = budget / MB if budget else None, phase_blocks(record, rows)
    label = "Memory in use over time"
    svg = run_figures.over_time(drawn, "memory in use after a step (MB)", label, blocks=blocks, limit=limit)
    caption = "Memory held between steps; the peaks within a step are in the figure by phase."
    return html.figure(f"Between steps the run held at most {top:.1f} MB{share}", svg, caption)


def _memory_model(record: Record) -> list[str]:
    lines = unit_lines(record)
    if not lines:
        return []
    budget = record.budget.get("memory_bytes")
    available = budget - record.profile.get("base_bytes", 0) if budget else None
    home = {unit: index for index, phase in enumerate(_training(record)) for unit in phase.units}
    used = [phase.batch_size for phase in _training(record)]
    points = [point.batch for line in lines.values() for point in line.points]
    largest = max([*points, *used, 8])
    names = list(lines)
    hungriest = max(names, key=lambda unit: lines[unit].sample_bytes)
    svg = run_figures.memory_lines(lines, home, available, largest, "Memory of every unit over batch size")
    growth = format_bytes(lines[hungriest].sample_bytes)
    title = f"Memory grows with the batch in straight lines; unit {names.index(hungriest) + 1} grows fastest"
    caption = "Points are measured; lines are the upper bounds fitted to them, numbered by unit. "
    caption += f"{hungriest}: {growth} per sample."
    parts = [html.figure(title, svg, caption)]
    if available is not None and used:
        parts.append(_batches(record, lines, home, available))
    return parts


def _batches(record: Record, lines: dict[str, ProbeLine], home: dict[str, int], available: float) -> str:
    phases = _training(record)
    fits = [line.largest_batch(available, MOST_UNITS_BATCH) for line in lines.values()]
    blocks = [home.get(unit) for unit in lines]
    used = [None if block is None else phases[block].batch_size for block in blocks]
    limit = record.workload.get("batch_limit")
    svg = run_figures.batches(fits, used, blocks, limit, "Largest batch per unit and batch size per block")
    smallest, largest = min(p.batch_size for p in phases), max(p.batch_size for p in phases)
    title = f"Blocks train with batches from {smallest} to {largest}"
    if smallest == largest:
        title = f"Everything trains with batches of {smallest}"
    caption = "Bars: the largest batch with which the unit alone would fit the budget. Lines: what its block used."
    return html.figure(title, svg, caption)


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
        rest = (
            "no exit does better"
            if math.isclose(gap, 0, abs_tol=0.005)
            else f"no other exit gains more than {gap:.1f} points"
        )
        title = f"Unit {mine.index + 1} of {of} is the exit: {percent(mine.val_accuracy)}, and {rest}"
    depth = html.figure(
        title,
        run_figures.exit_accuracy(points, chosen, "Validation accuracy of the exit after every unit"),
        "Every unit has a classifier of its own. The diamond is the exit that was chosen, on validation images alone.",
    )
    full = record.parameters.get("full") or last.parameters
    factor = full / max(mine.parameters, 1)
    size = f"{factor:.1f} times smaller than the whole network" if factor > 1.05 else "the whole network"
    return [
        depth,
        html.figure(
            f"The exit has {count(mine.parameters)} parameters, {size}",
            run_figures.exit_frontier(points, frontier, chosen, "Validation accuracy against parameters"),
            "Dashed: the frontier, the best accuracy for a number of parameters. Sizes count the exit's classifier.",
        ),
    ]


def _shares(rows: Sequence[MetricRow], column: str, *, epochs: bool = False) -> list[Curve]:
    found = curves(rows, column, epochs=epochs)
    for curve in found:
        curve.values[:] = [100 * value for value in curve.values]
    return found


def _accuracy_words(
    training: Sequence[Curve], validation: Sequence[Curve], metric: str, *, blocks: bool
) -> tuple[str, str]:
    caption = "Thin lines: training accuracy, a mean over a stretch of steps. " if training else ""
    if not validation:
        return "Accuracy on training images", caption.strip()
    best, when = max((v, s) for curve in validation for v, s in zip(curve.values, curve.seconds, strict=True))
    title = f"Validation {metric} reached {best:.1f} % after {format_seconds(when)}"
    whose = ", of the block's last exit" if blocks and len(validation) > 1 else ""
    return title, f"{caption}Points: validation {metric} after an epoch{whose}."
