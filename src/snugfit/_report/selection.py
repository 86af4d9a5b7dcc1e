"""Section on the selection of tensors: which trained when, what that saved, and how well it was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from snugfit._core.record import IntervalRecord, Record
from snugfit._quantities import format_bytes, format_seconds
from snugfit._report import selection_figures
from snugfit._report.formatting import NONE, count, percent, share
from snugfit._report.intervals import StepTime, Tensors, epoch_words, phase_of, step_time, tensors_of
from snugfit._report.markup import html

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
    chart = _map(intervals, tensors, str(record.settings.get("scheme", record.strategy)))
    figures = html.grid(filter(None, (chart, _flops(record, intervals), _steps(record, intervals))))
    return figures + html.below(html.table(HEAD, _rows(record, tensors)))


def _map(intervals: Sequence[IntervalRecord], tensors: Tensors, scheme: str) -> str:
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
    svg = selection_figures.selections(intervals, tensors, "Tensors that train, by interval")
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
    return html.figure(title, selection_figures.flops(intervals, images, "Operations per epoch"), caption)


def _steps(record: Record, intervals: Sequence[IntervalRecord]) -> str:
    step, ratio = step_time(intervals), record.budget.get("time_ratio")
    if step is None:
        return ""
    svg = selection_figures.step_times(intervals, ratio, "Time of a training step by interval")
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
