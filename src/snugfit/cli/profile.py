"""``snugfit profile``: what each unit of a model needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snugfit.cli.job import make_job, run_job
from snugfit.cli.options import NO_FLAGS, SHOW_ALL, UNITS_ALONE, OutputOptions, ProfileOptions, RequestFlags
from snugfit.cli.output import print_json
from snugfit.quantities import format_bytes, format_seconds


def profile(
    *, flags: RequestFlags = NO_FLAGS, more: ProfileOptions = UNITS_ALONE, output: OutputOptions = SHOW_ALL
) -> None:
    """Measure what each unit of a model needs: parameters, MACs, bytes and seconds.

    For example:

    ```
    snugfit profile --model resnet18 --data digits --batch-size 32 --learning-signal --json
    ```

    Args:
        flags: the options of the run.
        more: what is told beside the units.
        output: what is shown.
    """
    request = flags.request()
    job = make_job(
        "profile", output, request.machine.threads, request=request.to_json(), learning_signal=more.learning_signal
    )
    data = run_job(job)
    print_units(data)
    if "learning_signal" in data:
        print_learning_signal(data["learning_signal"], request.training.batch_size)
    if output.json:
        print_json(data)


def print_units(data: dict[str, Any]) -> None:
    """Print the units of ``profile --json`` as a table on stderr."""
    shape = " x ".join(str(size) for size in data.get("input_shape", ()))
    rows = []
    for unit in data["units"]:
        numbers = (f"{unit[key]:,}" for key in ("parameters", "macs"))
        sizes = (format_bytes(unit[key]) for key in ("output_bytes", "saved_bytes"))
        rows.append((unit["name"], *numbers, *sizes, format_seconds(unit["seconds"])))
    title = f"{data.get('model', '')}, input {shape}"
    _print_table(title, ("unit", "parameters", "MACs", "output", "saved", "time"), rows)


def print_learning_signal(signals: dict[str, dict[str, int]], batch_size: int) -> None:
    """Print ``learning_signal`` of ``profile --json`` as a table on stderr.

    Args:
        signals: by method ``macs``, ``additional_parameters`` and ``peak_bytes``; ``backprop`` among them.
        batch_size: images in the step whose peak it is.
    """
    whole = signals["backprop"]["macs"]
    rows = [
        (method, f"{row['macs']:,}", f"{row['macs'] / whole:.2%}", f"{row['additional_parameters']:,}",
         format_bytes(row["peak_bytes"]))
        for method, row in signals.items()
    ]  # fmt: skip
    title = f"learning signal: MACs per image; peak tensors of a step at batch {batch_size}"
    peak = "peak tensors (local: one unit at a time)"
    _print_table(title, ("method", "MACs", "of backprop's", "additional parameters", peak), rows)


def _print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(columns[0], title=title, title_justify="left")
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(stderr=True).print(table)
