"""One self-contained HTML page per run: no scripts, no requests, light and dark, wide and narrow."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit._core import record_checks
from snugfit._core.manifest import check_files, listing
from snugfit._core.outputs import require_file
from snugfit._core.record import Record
from snugfit._quantities import format_bytes, format_seconds
from snugfit._report.formatting import NONE, count, duration, metric_of, percent, share, size
from snugfit._report.intervals import StepTime, step_time
from snugfit._report.markup import absent, card, grid, meter, pairs, section, table, text, tile
from snugfit._report.metrics import MetricRow, read_metrics
from snugfit._storage.files import replacing
from snugfit.errors import CheckpointError

if TYPE_CHECKING:
    from snugfit._report.pictures import Pictures


def write_report(run_dir: Path, pictures: Pictures | None = None) -> Path:
    """Draw ``report.html`` from a run folder's ``record.json`` and ``metrics.csv``.

    Args:
        run_dir: the run folder.
        pictures: what is shown of the model itself, beside the record.

    Returns:
        Path of the page.

    Raises:
        CheckpointError: ``record.json`` is missing or damaged.
        UsageError, OutOfStorageError: the page cannot be written.
    """
    run_dir = Path(run_dir)
    record = require_page(run_dir)
    page = render(record, read_metrics(run_dir / "metrics.csv"), pictures)
    path = run_dir / "report.html"
    with listing(run_dir) as manifest, replacing(path, manifest) as file:
        file.write(page.encode("utf-8", errors="replace"))
    return path


def require_page(run_dir: Path) -> Record:
    """The record of a finished run, in whose folder the page can be written.

    Raises:
        CheckpointError: ``record.json`` is missing or damaged.
        UsageError, OutOfStorageError: the page cannot be written.
    """
    record = read_record(run_dir)
    require_file(run_dir / "report.html", "Make the run folder writable.")
    return record


def read_record(run_dir: Path) -> Record:
    """Read ``record.json``.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = run_dir / "record.json"
    check_files(run_dir, path.name, "metrics.csv")
    if not path.is_file():
        raise CheckpointError(
            f"{run_dir} holds no record.json: it is no run folder, or its run is not finished.\n"
            "Give the folder of a finished run, or finish this one with `snugfit train --resume`."
        )
    return record_checks.read_record(path)


def render(record: Record, rows: list[MetricRow], pictures: Pictures | None = None) -> str:
    """The page as HTML."""
    from snugfit._report import figure_sections, selection
    from snugfit._report.pictures import body as drawn

    title = f"{record.model} on {record.data}, {record.strategy}"
    body = "".join((
        _header(record),
        f"<section class=tiles aria-label=Summary>{''.join(_tiles(record))}</section>",
        section("Memory", figure_sections.memory(record, rows)),
        section("Selection of tensors", selection.body(record)),
        section("Exits", figure_sections.exits(record)),
        section("Training over time", figure_sections.over_time(record, rows)),
        section("Classes", figure_sections.classes(record)),
        section("Pictures", drawn(pictures) if pictures else ""),
        section("Phases", _phases(record) + grid(filter(None, (figure_sections.caches(record), _overhead(record))))),
        section("What ran, and where", _setting_cards(record)),
    ))  # fmt: skip
    style = resources.files("snugfit._report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        "<!DOCTYPE html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def verdict(record: Record) -> tuple[str, str]:
    """``good``, ``bad`` or ``plain``, and the sentence that goes with it."""
    limits = (("memory", record.budget.get("memory_bytes"), record.measured.get("peak_bytes")),
              ("storage", record.budget.get("storage_bytes"), record.measured.get("storage_bytes")))  # fmt: skip
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


def _header(record: Record) -> str:
    kind, words = verdict(record)
    limit = record.budget.get("memory_bytes")
    storage = record.budget.get("storage_bytes")
    parts = [f"{format_bytes(limit)} of memory" if limit else "unlimited memory"]
    parts += [f"{format_bytes(storage)} of storage"] if storage else []
    enforced = ("enforced" if record.enforced else "not enforced") if limit else ""
    budget = f"Budget: {', '.join(parts)}" + (f" ({enforced})" if enforced else "")
    ratio = record.budget.get("time_ratio")
    budget += f", rho {ratio:g} of a full step's time" if ratio else ""
    return (
        f"<header><p class=kicker>snugfit run report</p><h1>{text(record.model)} on {text(record.data)}</h1>"
        f"<p class=lead><span class='badge {kind}'>{text(words)}</span> "
        f"<span>Strategy <b>{text(record.strategy)}</b></span> <span>{text(budget)}</span> "
        f"<span>Device {text(record.device)}</span></p></header>"
    )


def _tiles(record: Record) -> list[str]:
    predicted, measured, accuracy = record.predicted, record.measured, record.accuracy
    peak, limit = measured.get("peak_bytes"), record.budget.get("memory_bytes")
    notes = [f"predicted {size(predicted.get('peak_bytes'))}"]
    notes += [f"budget {format_bytes(limit)}"] if limit else []
    bar = meter(peak, predicted.get("peak_bytes"), limit) if limit and peak is not None else ""
    test = accuracy.get("test")
    part, value = ("Test", test) if test is not None else ("Validation", accuracy.get("val"))
    rest = [f"validation {percent(accuracy.get('val'))}"] if test is not None else ["no test split"]
    rest += [f"top-5 {percent(accuracy['test_top5'])}"] if accuracy.get("test_top5") is not None else []
    step = step_time(record.intervals)
    return [
        tile("Peak memory", size(peak), " · ".join(notes), bar),
        *([_step_tile(step, record.budget.get("time_ratio"))] if step else []),
        tile(f"{part} {metric_of(record)}", percent(value), " · ".join(rest)),
        _size_tile(record),
        tile("Time", duration(measured.get("seconds")), f"predicted {duration(predicted.get('seconds'))}"),
        tile("Storage", size(measured.get("storage_bytes")), f"predicted {size(predicted.get('storage_bytes'))}"),
    ]


def _step_tile(step: StepTime, ratio: float | None) -> str:
    """rho: what a step took of a full one, against what was predicted and allowed."""
    predicted, used = step.predicted / step.full, None if step.measured is None else step.measured / step.full
    value = NONE if used is None else share(used)
    notes = [f"predicted {share(predicted)}"] + ([f"rho {ratio:g}"] if ratio else [])
    notes.append(f"{duration(step.measured)} instead of {duration(step.full)}")
    bar = meter(used, predicted, ratio) if ratio and used is not None else ""
    return tile("Step time over full step", value, " · ".join(notes), bar)


def _size_tile(record: Record) -> str:
    full, trained = record.parameters.get("full"), record.parameters.get("trained_model")
    if not full or not trained:
        return tile("Parameters", count(trained or full or 0))
    note = f"the whole of {record.model}"
    if trained != full:
        note = f"of {count(full)}: {full / trained:.1f} times smaller" if trained < full else f"{count(full)} before"
    if record.exit:
        note += f" · exit {record.exit.get('index', 0) + 1} of {record.exit.get('of', '?')}"
    return tile("Parameters of the trained model", count(trained), note)


def _phases(record: Record) -> str:
    if not record.phases:
        return absent("The record holds no phases.")
    head = ("phase", "units", "batch", "epochs", "steps", "predicted peak", "measured peak", "peak of tensors",
            "predicted time", "time", "cache")  # fmt: skip
    rows = [
        (
            p.name, len(p.units) or NONE, p.batch_size or NONE, p.epochs or NONE, p.steps or NONE,
            format_bytes(p.predicted_peak_bytes), format_bytes(p.measured_peak_bytes),
            format_bytes(p.tensor_peak_bytes) if p.tensor_peak_bytes else NONE,
            format_seconds(p.predicted_seconds), format_seconds(p.seconds),
            format_bytes(p.cache_bytes) if p.cache_bytes else NONE,
        )
        for p in record.phases
    ]  # fmt: skip
    return table(head, rows)


def _overhead(record: Record) -> str:
    total = record.measured.get("seconds")
    rows = [
        (name.replace("_", " "), duration(seconds), percent(seconds / total) if total else NONE)
        for name, seconds in record.overhead_seconds.items()
    ]
    return card("Time beside training", table(("what", "time", "of the run"), rows)) if rows else ""


def _setting_cards(record: Record) -> str:
    groups = (("Settings", record.settings), ("Workload", record.workload), ("Hardware", record.hardware))
    cards = [card(name, pairs(_flat(data))) for name, data in groups if data]
    measure = [("peak metric", record.measured.get("peak_metric")), ("run folder", record.run_dir)]
    measure.insert(1, ("peak of tensors", size(record.measured.get("tensor_peak_bytes"))))
    return grid([*cards, card("Measurement", pairs(measure))])


def _flat(data: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in data.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict):
            rows += _flat(value, f"{name} ")
        elif key.endswith("_bytes") and isinstance(value, (int, float)):
            rows.append((name.removesuffix(" bytes"), format_bytes(value)))
        else:
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
