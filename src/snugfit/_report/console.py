"""Progress in the terminal: a subscriber to the events of a run, which draws on stderr in the training thread."""

from __future__ import annotations

import atexit
import io
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from snugfit._core.plan import Cost
from snugfit._core.record import Record
from snugfit._quantities import format_bytes, format_seconds
from snugfit._report.formatting import (
    NONE,
    count,
    duration,
    kept_epoch,
    metric_of,
    metric_values,
    peak_range,
    percent,
    predicted_peak,
    share,
    shorten,
    size,
)
from snugfit._report.intervals import StepTime, step_time
from snugfit._report.tables import against, make_console, make_table, print_line
from snugfit._training import events

REFRESH_SECONDS = 0.125
PRIOR = 0.02
"""Share of the predicted time for which the prediction is trusted against the measurement."""


def start_line(event: events.RunStarted) -> Text:
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


def status_line(event: events.StepDone, budget: int | None, rate: str, left: str) -> Text:
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


def epoch_line(event: events.EpochDone, peak: int | None, budget: int | None, left: str) -> Text:
    """One epoch, for logs."""
    validation = _share("val" if event.metric == "accuracy" else f"val {event.metric}", event.val_accuracy)
    line = Text(f"{event.phase}  epoch {event.epoch + 1}/{event.epochs}  loss {event.loss:.4g}")
    own = "".join(f"  {name} {value:.4g}" for name, value in event.metrics.items() if value is not None)
    line.append(f"{_share('acc', event.accuracy)}{validation}{own}  {format_seconds(event.seconds)}")
    if peak is not None:
        line.append("  peak ").append(against(peak, budget))
    return line.append(f"  left {left}")


def exit_line(event: events.ExitMeasured) -> Text:
    """The exit after a unit."""
    return Text(
        f"exit {event.index + 1} after {event.unit}  val {percent(event.val_accuracy)}  "
        f"{count(event.parameters)} parameters"
    )


def selection_line(event: events.TensorsSelected) -> Text:
    """Number of tensors that train from now on, and the predicted time of a step."""
    chosen = event.interval
    line = Text.assemble((f"interval {event.index + 1}", "bold"), f"  {len(chosen.tensors)} of {event.count} tensors")
    line.append(f", step predicted {format_seconds(chosen.predicted_seconds)}")
    if chosen.full_seconds > 0:
        ratio = share(chosen.predicted_seconds / chosen.full_seconds)
        line.append(f" = {ratio} of full ({format_seconds(chosen.full_seconds)})")
    return line.append(", operators measured again" if chosen.profiled else "")


def phase_line(event: events.PhaseDone, predicted_seconds: float | None, budget: int | None) -> Text:
    """A finished phase: measurement and prediction."""
    held = event.measured_peak_bytes <= event.predicted_peak_bytes
    line = Text.assemble(("done  ", "green" if held else "yellow"), (event.name, "bold"), "  peak ")
    line.append(against(event.measured_peak_bytes, budget))
    predicted = peak_range(event.predicted_peak_bytes, event.predicted_kept_bytes)
    line.append(f" (predicted {predicted})  {format_seconds(event.seconds)}")
    return line.append("" if predicted_seconds is None else f" (predicted {format_seconds(predicted_seconds)})")


def result_table(record: Record) -> RenderableType:
    """The end of a run: predicted, measured and budget side by side, then facts about the model."""
    rows: list[tuple[str, str, Text | str, str]] = []
    shown = {"peak_bytes": "peak memory", "total_memory_bytes": "memory in all", "storage_bytes": "storage"}
    for key, name in shown.items():
        limit = "memory_bytes" if key == "peak_bytes" else key
        used, budget = record.measured.get(key), record.budget.get(limit)
        style = "" if budget is None or used is None else "red" if used > budget else "green"
        predicted = predicted_peak(record) if key == "peak_bytes" else size(record.predicted.get(key))
        rows.append((name, predicted, Text(size(used), style), size(budget)))
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


class TimeLeft:
    """Seconds that remain: the plan's prediction, scaled by the seconds since the run (or its resumption) began."""

    def __init__(self, predicted: Cost, started: float) -> None:
        self._predicted, self._started = predicted, started
        self._done = self._current = self._share = self._taken_up = 0.0
        self._later = predicted.seconds

    def start_phase(self, name: str, index: int, count: int) -> None:
        """Start a phase, ``index`` of ``count``; phases that a resumed run skips do not count."""
        phases = self._predicted.phases
        at = next((i for i, phase in enumerate(phases) if phase.name == name), index)
        if at < len(phases):
            self._current = phases[at].seconds
            self._later = sum(phase.seconds for phase in phases[at + 1 :])
        else:
            self._current = self._predicted.seconds / max(count, 1)
            self._later = self._current * max(count - index - 1, 0)
        self._share, self._taken_up = 0.0, 0.0

    def progress(self, share: float, *, first: bool = False) -> None:
        """Set the finished share of the phase, in [0, 1]; ``first`` if a resumed run starts there."""
        self._share = min(share, 1.0)
        if first:
            self._taken_up = self._share

    def end_phase(self) -> None:
        """End the phase."""
        self._done += self._current * (1 - self._taken_up)
        self._current = self._share = self._taken_up = 0.0

    def seconds(self, now: float) -> float:
        """Seconds left at clock reading ``now``."""
        done = self._done + self._current * (self._share - self._taken_up)
        left = self._current * (1 - self._share) + self._later
        prior = PRIOR * self._predicted.seconds
        scale = (now - self._started + prior) / (done + prior) if done + prior > 0 else 1.0
        return scale * left


class ConsoleProgress:
    """Shows a run as it goes: a live bar in a terminal, a line per epoch elsewhere.

    Create it before the memory baseline is taken: rich loads parts of itself when it first draws, which is done here.
    It works as a context manager, which leaves the terminal clean after an error; otherwise the process's exit does.
    ``quiet`` shows notices and nothing else; ``clock`` gives the time in seconds.

    >>> from snugfit import Notice
    >>> progress = ConsoleProgress(Console(width=60))  # by default on stderr
    >>> progress(Notice("the batch is 16"))
    note  the batch is 16
    """

    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or make_console()
        self.quiet = quiet
        self._clock = clock
        self._live: Live | None = None
        self._live_possible = self.console.is_terminal and not self.console.is_dumb_terminal
        self._drawn_at = float("-inf")
        self._started: events.RunStarted | None = None
        self._phase: events.PhaseStarted | None = None
        self._step: events.StepDone | None = None
        self._left: TimeLeft | None = None
        self._pace = 0.0
        self._handlers: dict[type[events.Event], Callable[[Any], None]] = {
            events.RunStarted: self._run_started,
            events.PhaseStarted: self._phase_started,
            events.StepDone: self._step_done,
            events.EpochDone: self._epoch_done,
            events.ExitMeasured: lambda exit_measured: self._print(exit_line(exit_measured)),
            events.CacheProgress: self._cache_progress,
            events.PhaseDone: self._phase_done,
            events.RunDone: self._run_done,
            events.ProbeMeasured: self._probe_measured,
            events.TensorsSelected: lambda selected: self._print(selection_line(selected)),
        }
        _warm_up()

    def __call__(self, event: events.Event) -> None:
        """Show an event."""
        if isinstance(event, events.Notice):
            self._print(Text.assemble(("note  ", "yellow"), event.message))
        elif not self.quiet and type(event) in self._handlers:
            self._handlers[type(event)](event)

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the live bar; safe to call at any time and more than once."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            atexit.unregister(self.close)

    def _run_started(self, event: events.RunStarted) -> None:
        self.close()
        self._started, self._phase, self._step = event, None, None
        self._left = TimeLeft(event.predicted, self._clock())
        self._print(start_line(event))

    def _phase_started(self, event: events.PhaseStarted) -> None:
        self._phase, self._step, self._pace = event, None, 0.0
        if self._left is not None:
            self._left.start_phase(event.name, event.index, event.count)
        self._draw(event.name, 0.0, "")

    def _step_done(self, event: events.StepDone) -> None:
        phase, now = self._phase, self._clock()
        self._pace = 0.9 * self._pace + 0.1 * event.seconds if self._pace else event.seconds
        if phase is None:
            return
        total = max(phase.epochs * event.steps, 1)
        share = ((event.epoch - phase.first_epoch) * event.steps + event.step) / total
        if self._left is not None:
            if self._step is None:
                self._left.progress(share - 1 / total, first=True)
            self._left.progress(share)
        self._step = event
        if self._due(now):
            where = f"epoch {event.epoch + 1}/{phase.first_epoch + phase.epochs}  step {event.step}/{event.steps}"
            rate = speed(event.samples, self._pace)
            self._draw(phase.name, share, where, status_line(event, self._budget, rate, self._time_left()))

    def _epoch_done(self, event: events.EpochDone) -> None:
        if not self._live_possible:
            peak = self._step.peak_bytes if self._step else None
            self._print(epoch_line(event, peak, self._budget, self._time_left()))

    def _cache_progress(self, event: events.CacheProgress) -> None:
        if self._due(self._clock()) or event.done >= event.total:
            share = event.done / max(event.total, 1)
            below = f"{format_bytes(event.bytes_written)} written  left {self._time_left()}"
            self._draw("writing cache", share, f"{event.done}/{event.total} samples", Text(below))

    def _probe_measured(self, event: events.ProbeMeasured) -> None:
        if event.index == 1 and not self._live_possible:
            self._print(Text(f"measuring {event.count} parts of the network"))
        if self._due(self._clock()) or event.index == event.count:
            self._draw("measuring", event.index / max(event.count, 1), f"{event.index}/{event.count}", Text(event.name))
        if event.index == event.count:
            self.close()

    def _phase_done(self, event: events.PhaseDone) -> None:
        if self._left is not None:
            self._left.end_phase()
        phases = self._started.predicted.phases if self._started else ()
        predicted = next((phase.seconds for phase in phases if phase.name == event.name), None)
        self._print(phase_line(event, predicted, self._budget))

    def _run_done(self, event: events.RunDone) -> None:
        self.close()
        self.console.print(result_table(event.record))

    @property
    def _budget(self) -> int | None:
        return self._started.budget_bytes if self._started else None

    def _time_left(self) -> str:
        return NONE if self._left is None else duration(self._left.seconds(self._clock()))

    def _due(self, now: float) -> bool:
        return self._live_possible and now - self._drawn_at >= REFRESH_SECONDS

    def _print(self, line: Text) -> None:
        print_line(self.console, line)

    def _draw(self, name: str, share: float, where: str, below: Text | str = "") -> None:
        if not self._live_possible:
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start()
            self.console.show_cursor(True)
            atexit.register(self.close)
        self._live.update(frame(name, share, where, below), refresh=True)
        self._drawn_at = self._clock()


def _warm_up() -> None:
    """Draw one of everything into a buffer, so that rich has loaded all its parts before memory counts."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
        live.update(frame("block \N{HORIZONTAL ELLIPSIS}", 0.5, "epoch 1/1", Text("note", "yellow")), refresh=True)
        console.print(Text("line", "green"), soft_wrap=True)
    console.print(make_table("", ("a", "b"), [("1", NONE)]))
