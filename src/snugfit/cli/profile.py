"""``snugfit profile``: what each unit of a model needs."""

from __future__ import annotations

from typing import Any

from snugfit.cli.job import make_job, run_job
from snugfit.cli.options import NO_FLAGS, SHOW_ALL, OutputOptions, RequestFlags
from snugfit.cli.output import print_json
from snugfit.quantities import format_bytes, format_seconds


def profile(*, flags: RequestFlags = NO_FLAGS, output: OutputOptions = SHOW_ALL) -> None:
    """Measure what each unit of a model needs: parameters, MACs, bytes and seconds.

    For example:

    ```
    snugfit profile --model resnet18 --data digits --batch-size 32 --json
    ```

    Args:
        flags: the options of the run.
        output: what is shown.
    """
    request = flags.request()
    job = make_job("profile", output, request.machine.threads, request=request.to_json())
    data = run_job(job)
    print_units(data)
    if output.json:
        print_json(data)


def print_units(data: dict[str, Any]) -> None:
    """Print the units of ``profile --json`` as a table on stderr."""
    from rich.console import Console
    from rich.table import Table

    shape = " x ".join(str(size) for size in data.get("input_shape", ()))
    table = Table("unit", title=f"{data.get('model', '')}, input {shape}", title_justify="left")
    for column in ("parameters", "MACs", "output", "saved", "time"):
        table.add_column(column, justify="right")
    for unit in data["units"]:
        numbers = (f"{unit[key]:,}" for key in ("parameters", "macs"))
        sizes = (format_bytes(unit[key]) for key in ("output_bytes", "saved_bytes"))
        table.add_row(unit["name"], *numbers, *sizes, format_seconds(unit["seconds"]))
    Console(stderr=True).print(table)
