"""Trials as a table for the terminal: predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from snugfit._core.trial import Trial
from snugfit._report.console_lines import against, make_console
from snugfit._report.formatting import NONE, duration, size


def print_comparison(trials: Sequence[Trial], file: TextIO | None = None) -> None:
    """Print a row per trial; to stderr by default."""
    make_console(file).print(comparison_table(trials))


def comparison_table(trials: Sequence[Trial]) -> Table:
    """A row per trial: peak and seconds, predicted and measured, and measured over predicted; or why it failed."""
    images = max((trial.images for trial in trials), default=0)
    title = Text(f"Trials: one epoch over {images} images each", "bold")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("strategy", no_wrap=True)
    for head in ("predicted\npeak", "measured,\nof budget", "ratio", "predicted\ntime", "measured", "ratio"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("error", ratio=1)
    for trial in trials:
        table.add_row(
            trial.strategy, size(trial.predicted_peak_bytes), against(trial.measured_peak_bytes, trial.budget_bytes),
            _ratio(trial.peak_ratio), duration(trial.predicted_seconds), duration(trial.measured_seconds),
            _ratio(trial.seconds_ratio), Text(trial.error or "", "red"),
        )  # fmt: skip
    return table


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
