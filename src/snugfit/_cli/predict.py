"""``snugfit predict``: classes for a folder of images, or the objects in them."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from typing import Any

from snugfit._cli.child_process import make_job, run_job
from snugfit._cli.failures import FailedError
from snugfit._cli.options import SHOW_ALL, OutputOptions
from snugfit._cli.output import SCHEMA, print_json
from snugfit._core.options import Count, Workers
from snugfit._storage.outputs import require_file, whole_file
from snugfit.errors import DataError

COLUMNS = ("path", "class", "probability", "left", "top", "right", "bottom")
"""The last four only if the model detects boxes."""


def predict(
    run: str,
    folder: str,
    /,
    *,
    out: str | None = None,
    top: Count | None = None,
    threads: Workers | None = None,
    output: OutputOptions = SHOW_ALL,
) -> None:
    """Classify images with a finished run's model, or find objects in them.

    Prints CSV with the columns path, class and probability; for objects left, top, right and bottom follow, in pixels.

    For example:

    ```
    snugfit predict runs/first photos/ --top 3 --out classes.csv
    ```

    Args:
        run: folder of a finished run, as printed by `snugfit train`.
        folder: folder of images, or one image.
        out: CSV file to write, whose path is then printed; stdout by default.
        top: classes per image, the likeliest first, by default 1; or the most objects, by default all.
        threads: compute threads; all cores by default, or OMP_NUM_THREADS.
        output: what is shown.
    """
    if out is not None:
        require_file(out)
    job = make_job("predict", output, threads, run=run, images=folder, top=top)
    if out is not None:
        count = _to_file(job, out)
        if output.json:
            print_json({"schema": SCHEMA, "out": out, "rows": count})
        else:
            print(out)
    elif output.json:
        rows: list[list[Any]] = []
        run_job(job, rows.append)
        print_json({"schema": SCHEMA, "predictions": [dict(zip(COLUMNS, row, strict=False)) for row in rows]})
    else:
        run_job(job, _writer(sys.stdout))


def _writer(file: Any) -> Callable[[list[Any]], None]:
    """Write rows as CSV, the header with the first row, so that an error before it leaves no output."""
    writer, head = csv.writer(file, lineterminator="\n"), [COLUMNS]

    def write(row: list[Any]) -> None:
        if head:
            writer.writerow(head.pop()[: len(row)])
        writer.writerow([*row[:2], f"{row[2]:.6f}", *(f"{pixels:.1f}" for pixels in row[3:])])

    return write


def _to_file(job: dict[str, Any], out: str) -> int:
    """Write the whole CSV or nothing; unreadable images are left out and reported at the end."""
    rows, left_out = 0, None
    with whole_file(out) as file:
        write = _writer(file)

        def count(row: list[Any]) -> None:
            nonlocal rows
            write(row)
            rows += 1

        try:
            run_job(job, count)
        except FailedError as error:
            if error.kind != DataError.__name__ or not rows:
                raise
            left_out = error
    if left_out is not None:
        raise left_out
    return rows
