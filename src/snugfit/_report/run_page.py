"""What a run's page shows: headline figures, and sections of figures, cards and tables. Imported only to draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit._core.record import PhaseRecord, Record
from snugfit._quantities import format_bytes, format_seconds
from snugfit._report import memory, picture_sections, results, selection
from snugfit._report.formatting import (
    NONE,
    duration,
    kept_epoch,
    metric_of,
    metric_values,
    peak_range,
    percent,
    share,
    size,
)
from snugfit._report.intervals import step_time
from snugfit._report.markup import Macros, html, page
from snugfit._report.metrics import MetricRow

if TYPE_CHECKING:
    from snugfit._report.pictures import Pictures

_PHASE_COLUMNS: dict[str, Callable[[PhaseRecord], Any]] = {
    "phase": lambda p: p.name,
    "units": lambda p: len(p.units) or NONE,
    "batch": lambda p: p.batch_size or NONE,
    "epochs": lambda p: p.epochs or NONE,
    "steps": lambda p: p.steps or NONE,
    "predicted peak": lambda p: peak_range(p.predicted_peak_bytes, p.predicted_kept_bytes),
    "measured peak": lambda p: format_bytes(p.measured_peak_bytes),
    "peak of tensors": lambda p: format_bytes(p.tensor_peak_bytes) if p.tensor_peak_bytes else NONE,
    "predicted time": lambda p: format_seconds(p.predicted_seconds),
    "time": lambda p: format_seconds(p.seconds),
    "cache": lambda p: format_bytes(p.cache_bytes) if p.cache_bytes else NONE,
}


def render(record: Record, rows: list[MetricRow], pictures: Pictures | None = None) -> str:
    """The page as HTML."""
    sections = [
        ("Memory", memory.memory(record, rows)),
        ("Selection of tensors", selection.body(record)),
        ("Exits", results.exits(record)),
        ("Training over time", results.over_time(record, rows)),
        ("Classes", results.classes(record)),
        ("Pictures", picture_sections.body(pictures) if pictures else ""),
        ("Phases", _phases(record) + html.grid(filter(None, (memory.caches(record), _overhead(record))))),
        ("What ran, and where", _setting_cards(record)),
    ]
    heading = f"{record.model} on {record.data}"
    title = f"{heading}, {record.strategy}"
    parts = Macros("run.html")
    tiles = parts.tiles(
        record, metric_of(record), step_time(record.intervals), kept_epoch(record), metric_values(record)
    )
    return page(title, "snugfit run report", heading, sections, parts.lead(record, verdict(record)), tiles)


def verdict(record: Record) -> tuple[str, str]:
    """``good``, ``bad`` or ``plain``, and the sentence that goes with it."""
    limits = [
        (name.replace("_", " "), record.budget.get(f"{name}_bytes"), record.measured.get(measured))
        for name, measured in (
            ("memory", "peak_bytes"),
            ("total_memory", "total_memory_bytes"),
            ("storage", "storage_bytes"),
        )
    ]
    over = [
        f"{name} by {format_bytes(used - limit)}" for name, limit, used in limits if limit and used and used > limit
    ]
    ratio, step = record.budget.get("time_ratio"), step_time(record.intervals)
    if ratio and step and step.measured and step.over(ratio):
        over.append(f"step time, {share(step.measured / step.full)} of a full one instead of {ratio:g}")
    if over:
        return "bad", f"Over budget: {' and '.join(over)}"
    if not ratio and not any(limit for _, limit, _ in limits):
        return "plain", "No budget was set"
    if limits[0][1] and limits[0][2] is None:
        return "plain", "Memory could not be measured on this machine"
    return "good", "Within budget"


def _phases(record: Record) -> str:
    if not record.phases:
        return html.absent("The record holds no phases.")
    return html.table(_PHASE_COLUMNS, [[cell(phase) for cell in _PHASE_COLUMNS.values()] for phase in record.phases])


def _overhead(record: Record) -> str:
    total = record.measured.get("seconds")
    rows = [
        (name.replace("_", " "), duration(seconds), percent(seconds / total) if total else NONE)
        for name, seconds in record.overhead_seconds.items()
    ]
    return html.card("Time outside training", html.table(("what", "time", "of the run"), rows)) if rows else ""


def _setting_cards(record: Record) -> str:
    groups = (("Settings", record.settings), ("Workload", record.workload), ("Hardware", record.hardware))
    cards = [html.card(name, html.pairs(_flat(data))) for name, data in groups if data]
    measure = [("peak metric", record.measured.get("peak_metric")), ("run folder", record.run_dir)]
    measure.insert(1, ("peak of tensors", size(record.measured.get("tensor_peak_bytes"))))
    if (total := record.measured.get("total_memory_bytes")) is not None:
        measure.insert(2, ("peak of all processes", size(total)))
    return html.grid([*cards, html.card("Measurement", html.pairs(measure))])


def _flat(data: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names and values; those of nested lists, such as units of modules, are in the record."""
    rows = []
    for key, value in data.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict):
            rows += _flat(value, f"{name} ")
        elif key.endswith("_bytes") and isinstance(value, (int, float)):
            rows.append((name.removesuffix(" bytes"), format_bytes(value)))
        elif not (isinstance(value, (list, tuple)) and any(isinstance(each, (list, tuple)) for each in value)):
            rows.append((name, _plain(value)))
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value) if value else NONE
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value is None else str(value)
