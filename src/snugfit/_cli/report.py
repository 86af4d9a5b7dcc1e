"""``snugfit report``: the run's HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from snugfit._cli.child_process import make_job, run_job
from snugfit._cli.failures import explain, unreported
from snugfit._cli.options import SHOW_ALL, OutputOptions
from snugfit._cli.output import SCHEMA, note, print_json
from snugfit._core.options import Workers
from snugfit.errors import UsageError


def report(
    run: str,
    /,
    *,
    pictures: Annotated[bool, Parameter(negative="")] = False,
    data: str | None = None,
    data_dir: str | None = None,
    threads: Workers | None = None,
    output: OutputOptions = SHOW_ALL,
) -> None:
    """Draw the page of a finished run, with predictions and measurements, and print its path.

    For example:

    ```
    snugfit report runs/first --pictures
    ```

    Args:
        run: folder of a finished run, as printed by `snugfit train`.
        pictures: add spectra of the basis of LLS and of the activations, t-SNE of what `lls-mxm` learned, and Grad-CAM
            heat maps over images, as far as the run allows. They need the data set.
        data: data set of the pictures, a name or `folder:PATH`; the run's own by default.
        data_dir: where data sets are (`SNUGFIT_DATA` otherwise).
        threads: compute threads of the pictures; all cores by default, or OMP_NUM_THREADS.
        output: what is shown.

    Raises:
        CheckpointError: the folder holds no finished run.
        UsageError: options of pictures are given without --pictures.
    """
    if not pictures and (data, data_dir, threads) != (None, None, None):
        raise UsageError("--data, --data-dir and --threads are for the pictures of a report; add --pictures.")
    drawn: dict[str, Any] = (
        {"report": _write(run)}
        if not pictures
        else run_job(make_job("report", output, threads, run=run, data=data, data_dir=data_dir))
    )
    for line in drawn.get("missing", ()):
        note(line)
    if output.json:
        print_json({"schema": SCHEMA, **drawn})
    else:
        print(drawn["report"])


def draw(run_dir: str) -> str | None:
    """Draw the page after training; if that fails, warn, because the run is complete.

    Raises:
        InterruptedRunError: a signal came while drawing.
    """
    try:
        return _write(run_dir)
    except KeyboardInterrupt as error:
        raise unreported(run_dir) from error
    except Exception as error:
        note(f"warning: the report was not drawn, {explain(error)}\n`snugfit report {run_dir}` tries again.")
        return None


def _write(run_dir: str) -> str:
    from snugfit._report.page import write_report

    return str(write_report(Path(run_dir)))
