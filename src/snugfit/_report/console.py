"""Progress in the terminal: a subscriber to the events of a run, which draws on stderr in the training thread."""

from __future__ import annotations

import atexit
import io
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from snugfit._core.plan import Cost
from snugfit._quantities import format_bytes
from snugfit._report.console_lines import (
    epoch_line,
    exit_line,
    frame,
    phase_line,
    result_table,
    selection_line,
    speed,
    start_line,
    status_line,
)
from snugfit._report.formatting import NONE, duration
from snugfit._report.tables import make_console, make_table, print_line
from snugfit._training import events
from snugfit._training.events import Event, Notice, PhaseStarted, RunStarted, StepDone

REFRESH_SECONDS = 0.125
PRIOR = 0.02
"""Share of the predicted time for which the prediction is trusted against the measurement."""


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
        self._started: RunStarted | None = None
        self._phase: PhaseStarted | None = None
        self._step: StepDone | None = None
        self._left: TimeLeft | None = None
        self._pace = 0.0
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            RunStarted: self._run_started,
            PhaseStarted: self._phase_started,
            StepDone: self._step_done,
            events.EpochDone: self._epoch_done,
            events.ExitMeasured: lambda exit_measured: self._print(exit_line(exit_measured)),
            events.CacheProgress: self._cache_progress,
            events.PhaseDone: self._phase_done,
            events.RunDone: self._run_done,
            events.ProbeMeasured: self._probe_measured,
            events.TensorsSelected: lambda selected: self._print(selection_line(selected)),
        }
        _warm_up()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, Notice):
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

    def _run_started(self, event: RunStarted) -> None:
        self.close()
        self._started, self._phase, self._step = event, None, None
        self._left = TimeLeft(event.predicted, self._clock())
        self._print(start_line(event))

    def _phase_started(self, event: PhaseStarted) -> None:
        self._phase, self._step, self._pace = event, None, 0.0
        if self._left is not None:
            self._left.start_phase(event.name, event.index, event.count)
        self._draw(event.name, 0.0, "")

    def _step_done(self, event: StepDone) -> None:
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
