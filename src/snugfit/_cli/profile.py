"""``snugfit profile``: what each unit of a model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snugfit._cli.child_process import make_job, run_job
from snugfit._cli.options import NO_FLAGS, SHOW_ALL, UNITS_ALONE, OutputOptions, ProfileOptions, RequestFlags
from snugfit._cli.output import note, print_json, print_tables
from snugfit._core.inputs import Input, described
from snugfit._quantities import format_bytes, format_seconds, format_short_seconds
from snugfit._storage.outputs import require_file, require_folder
from snugfit.errors import UsageError

_ACTIVATION_KINDS = ("temporary", "cumulative", "peak")


def profile(
    *, flags: RequestFlags = NO_FLAGS, more: ProfileOptions = UNITS_ALONE, output: OutputOptions = SHOW_ALL
) -> None:
    """Measure what each unit of a model needs: parameters, MACs, bytes and seconds.

    For example:

    ```
    snugfit profile --model resnet18 --data digits --batch-size 32 --tensors
    snugfit profile --model resnet18 --input-shape 3x224x224 --classes 100
    snugfit profile --model mobilenet_v2 --data digits --image-size 224 --batch-size 8 --activation-memory --json
    ```

    Args:
        flags: the options of the run.
        more: what is shown in addition to the units.
        output: what is shown.
    """
    if not more.activation_memory and (more.trained, more.chart) != (None, None):
        raise UsageError("--trained and --chart need --activation-memory; add it.")
    if more.chart is not None:
        from snugfit._report.activation import CHART

        require_folder(Path(more.chart).parent, CHART)
        if Path(more.chart).parent.is_dir():
            require_file(more.chart, CHART)
    request = flags.request()
    tables = {name: getattr(more, name) for name in ("learning_signal", "tensors", "activation_memory", "trained")}
    job = make_job("profile", output, request.machine.threads, request=request.to_json(), tables=tables)
    data = run_job(job)
    print_units(data)
    if "learning_signal" in data:
        print_learning_signal(data["learning_signal"], data["batch_size"])
    if "tensors" in data:
        print_tensors(data["tensors"], data["tensor_timing"])
    if "activation_memory" in data:
        print_activation_memory(data["activation_memory"])
    if more.chart is not None:
        from snugfit._report.activation import write_activation_page

        note(f"chart: {write_activation_page(Path(more.chart), data['model'], data['activation_memory'])}")
    if output.json:
        print_json(data)


def print_units(data: dict[str, Any]) -> None:
    """Print the units of ``profile --json`` as a table on stderr."""
    takes, rows = f"input {' x '.join(map(str, data.get('input_shape', ())))}", []
    if "inputs" in data:
        takes = f"inputs {described([Input(**each) for each in data['inputs']])}"
    for unit in data["units"]:
        numbers = (f"{unit[key]:,}" for key in ("parameters", "macs"))
        sizes = (format_bytes(unit[key]) for key in ("output_bytes", "saved_bytes"))
        seconds = "-" if unit["seconds"] is None else format_seconds(unit["seconds"])
        rows.append((unit["name"], *numbers, *sizes, seconds))
    title = f"{data.get('model', '')}, {takes}"
    print_tables((title, ("unit", "parameters", "MACs", "output", "saved", "time"), rows))


def print_learning_signal(signals: dict[str, dict[str, int]], batch_size: int) -> None:
    """Print ``learning_signal`` of ``profile --json`` (by method, the baseline first) as a table on stderr."""
    baseline, rows = next(iter(signals)), []
    whole = signals[baseline]["macs"]
    for method, row in signals.items():
        macs, more = row["macs"], row["additional_parameters"]
        rows.append((method, f"{macs:,}", f"{macs / whole:.2%}", f"{more:,}", format_bytes(row["peak_bytes"])))
    title = f"learning signal: MACs per image; peak tensors of a step at batch {batch_size}"
    peak = "peak tensors (local: one unit at a time)"
    print_tables((title, ("method", "MACs", f"of {baseline}'s", "additional parameters", peak), rows))


def print_tensors(tensors: list[dict[str, Any]], timing: dict[str, Any]) -> None:
    """Print ``tensors`` and ``tensor_timing`` of ``profile --json`` as a table on stderr."""
    rows = []
    for row in tensors:
        seconds = (format_short_seconds(row[key]) for key in ("t_dw", "t_dy"))
        rows.append((row["name"], f"{row['parameters']:,}", *seconds, format_bytes(row["saved_bytes"])))
    batch, steps = timing["batch"], timing["steps"]
    whole = f"forward pass {format_short_seconds(timing['forward_seconds'])}"
    if steps:
        images = "" if steps["batch"] == batch else f" of {steps['batch']}"
        whole += f", full step{images} {format_short_seconds(steps['stock'])}"
    title = f"tensors in order of execution, batch of {batch}\n{whole}\nt_dw: its gradient and update\n"
    title += "t_dy: passing the gradient on\nsaved: per image, because it trains"
    print_tables((title, ("tensor", "parameters", "t_dw", "t_dy", "saved"), rows))


def print_activation_memory(memory: dict[str, Any]) -> None:
    """Print ``activation_memory`` of ``profile --json`` as tables on stderr."""
    rows = []
    for index, block in enumerate(memory["blocks"]):
        sizes = [format_bytes(block[f"{kind}_bytes"]) for kind in _ACTIVATION_KINDS]
        rows.append((f"{index} {block['name']}", *sizes[:2], sizes[2] + " *" * (index == memory["peak_block"])))
    title = f"activation memory, {memory['trained']} trained; * where the peak is\nthe paper's rule, one image"
    from snugfit._report.activation import totals

    print_tables((title, ("block", *_ACTIVATION_KINDS), rows))
    print_tables(("whole step", ("figure", "bytes"), totals(memory)))
