"""Lines and tables of the console: functions from events and records to rich's renderables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from snugfit._core.record import Record
from snugfit._quantities import format_bytes, format_seconds
from snugfit._report.formatting import (
    NONE,
    count,
    duration,
    kept_epoch,
    metric_of,
    metric_values,
    percent,
    share,
    shorten,
    size,
)
from snugfit._report.intervals import StepTime, step_time
from snugfit._report.tables import against, make_table
from snugfit._training.events import EpochDone, ExitMeasured, PhaseDone, RunStarted, StepDone, TensorsSelected


def start_line(event: RunStarted) -> Text:
    """Model, data, strategy, budget and prediction."""
    budget = "no memory budget"
    if event.budget_bytes is not None:
        budget = f"budget {format_bytes(event.budget_bytes)} ({'enforced' if event.enforced else 'not enforced'})"
    predicted = f"predicted {format_bytes(event.predicted.peak_bytes)}, {format_seconds(event.predicted.seconds)}"
    verb = "resuming " if event.resumed else ""
    what = (f"{event.model} on {event.data}", "bold")
    return Text.assemble(verb, what, f"  {event.strategy}  {budget}  {predicted}")


def frame(name: str, share: float, where: str, below: Text | str) -> RenderableType:
    """The live display: a bar for the phase, and a line of figures under it."""
    columns = (Column(no_wrap=True), Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis"))
    row = Table.grid(*columns, padding=(0, 2, 0, 0))
    bar = ProgressBar(total=1.0, completed=share, width=24)
    row.add_row(Text(shorten(name, 36), "bold"), bar, Text(f"{100 * share:3.0f} %  {where}"))
    return Group(row, Text(below, no_wrap=True, overflow="ellipsis") if isinstance(below, str) else below)


def status_line(event: StepDone, budget: int | None, rate: str, left: str) -> Text:
    """Loss, accuracy, learning rate, speed, live memory against the budget, time left."""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("peak ").append(against(event.peak_bytes, budget))
    line.append(f"  left {left}  loss {event.loss:.4g}{_share('acc', event.accuracy)}  {rate}  lr {event.lr:.3g}")
    return line


def speed(samples: int, seconds: float) -> str:
    """Samples per second of a step; steps per second if the number of samples is unknown."""
    if seconds <= 0:
        return NONE
    return f"{samples / seconds:,.0f} samples/s" if samples else f"{1 / seconds:.3g} steps/s"


def epoch_line(event: EpochDone, peak: int | None, budget: int | None, left: str) -> Text:
    """One epoch, for logs."""
    validation = _share("val" if event.metric == "accuracy" else f"val {event.metric}", event.val_accuracy)
    line = Text(f"{event.phase}  epoch {event.epoch + 1}/{event.epochs}  loss {event.loss:.4g}")
    own = "".join(f"  {name} {value:.4g}" for name, value in event.metrics.items() if value is not None)
    line.append(f"{_share('acc', event.accuracy)}{validation}{own}  {format_seconds(event.seconds)}")
    if peak is not None:
        line.append("  peak ").append(against(peak, budget))
    return line.append(f"  left {left}")


def exit_line(event: ExitMeasured) -> Text:
    """The exit after a unit."""
    return Text(
        f"exit {event.index + 1} after {event.unit}  val {percent(event.val_accuracy)}  "
        f"{count(event.parameters)} parameters"
    )


def selection_line(event: TensorsSelected) -> Text:
    """Number of tensors that train from now on, and the predicted time of a step."""
    chosen = event.interval
    line = Text.assemble((f"interval {event.index + 1}", "bold"), f"  {len(chosen.tensors)} of {event.count} tensors")
    line.append(f", step predicted {format_seconds(chosen.predicted_seconds)}")
    if chosen.full_seconds > 0:
        ratio = share(chosen.predicted_seconds / chosen.full_seconds)
        line.append(f" = {ratio} of full ({format_seconds(chosen.full_seconds)})")
    return line.append(", operators measured again" if chosen.profiled else "")


def phase_line(event: PhaseDone, predicted_seconds: float | None, budget: int | None) -> Text:
    """A finished phase: measurement and prediction."""
    held = event.measured_peak_bytes <= event.predicted_peak_bytes
    line = Text.assemble(("done  ", "green" if held else "yellow"), (event.name, "bold"), "  peak ")
    line.append(against(event.measured_peak_bytes, budget))
    line.append(f" (predicted {format_bytes(event.predicted_peak_bytes)})  {format_seconds(event.seconds)}")
    return line.append("" if predicted_seconds is None else f" (predicted {format_seconds(predicted_seconds)})")


def result_table(record: Record) -> RenderableType:
    """The end of a run: predicted, measured and budget side by side, then facts about the model."""
    rows: list[tuple[str, str, Text | str, str]] = []
    shown = {"peak_bytes": "peak memory", "total_memory_bytes": "memory in all", "storage_bytes": "storage"}
    for key, name in shown.items():
        limit = "memory_bytes" if key == "peak_bytes" else key
        used, budget = record.measured.get(key), record.budget.get(limit)
        style = "" if budget is None or used is None else "red" if used > budget else "green"
        rows.append((name, size(record.predicted.get(key)), Text(size(used), style), size(budget)))
    rows.append(("time", duration(record.predicted.get("seconds")), duration(record.measured.get("seconds")), NONE))
    if (step := step_time(record.intervals)) is not None:
        rows.append(_step_row(step, record.budget.get("time_ratio")))
    table = make_table("", ("", "predicted", "measured", "budget"), rows)
    facts = Table.grid(padding=(0, 2, 0, 0))
    for label, value in _facts(record):
        facts.add_row(Text(label, "dim"), value)
    return Group("", table, "", facts)


def _step_row(step: StepTime, budget: float | None) -> tuple[str, str, Text | str, str]:
    """Time of a step, and its share of a full one."""
    measured = Text(NONE)
    if step.measured is not None:
        style = "" if budget is None else "red" if step.over(budget) else "green"
        measured = Text(f"{format_seconds(step.measured)} = {share(step.measured / step.full)}", style)
    predicted = f"{format_seconds(step.predicted)} = {share(step.predicted / step.full)}"
    limit = NONE if budget is None else f"{share(budget)} of {format_seconds(step.full)}"
    return "step time", predicted, measured, limit


def _facts(record: Record) -> list[tuple[str, str]]:
    shown = {"validation": "val", "test": "test", "test top-5": "test_top5"}
    measured = {name: record.accuracy.get(key) for name, key in shown.items()}
    accuracy = [f"{name} {percent(value)}" for name, value in measured.items() if value is not None]
    others = [(name, ", ".join(f"{split} {number}" for split, number in each)) for name, each in metric_values(record)]
    full, trained = record.parameters.get("full", 0), record.parameters.get("trained_model", 0)
    smaller = f" of {count(full)} ({full / trained:.1f} times smaller)" if 0 < trained < full else ""
    facts = [(metric_of(record), ", ".join(accuracy) or NONE), *others, ("parameters", count(trained) + smaller)]
    if kept := kept_epoch(record):
        facts.insert(1, ("kept weights", f"those of {kept}; the {metric_of(record)} is theirs"))
    if record.exit:
        place = f"unit {record.exit.get('index', 0) + 1} of {record.exit.get('of')}"
        facts.append(("exit", f"after {record.exit.get('unit')}, {place}"))
    return [*facts, ("run folder", record.run_dir)]


def _share(name: str, value: float | None) -> str:
    return "" if value is None else f"  {name} {percent(value)}"
