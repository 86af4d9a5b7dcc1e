"""``snugfit report``: the run's HTML page."""

from __future__ import annotations

from pathlib import Path

from snugfit.cli.failures import explain
from snugfit.cli.options import SHOW_ALL, OutputOptions
from snugfit.cli.output import SCHEMA, note, print_json


def report(run: str, /, *, output: OutputOptions = SHOW_ALL) -> None:
    """Draw the page of a finished run, predictions beside measurements, and print its path.

    For example:

    ```
    snugfit report runs/first
    ```

    Args:
        run: folder of a finished run, as printed by `snugfit train`.
        output: what is shown.

    Raises:
        CheckpointError: the folder holds no finished run.
    """
    page = _write(run)
    if output.json:
        print_json({"schema": SCHEMA, "report": page})
    else:
        print(page)


def draw(run_dir: str) -> str | None:
    """Draw the page after training; a failure is said and does not spoil the run."""
    try:
        return _write(run_dir)
    except Exception as error:
        note(f"warning: the report was not drawn, {explain(error)}\n`snugfit report {run_dir}` tries again.")
        return None


def _write(run_dir: str) -> str:
    from snugfit.report.page import write_report

    return str(write_report(Path(run_dir)))
