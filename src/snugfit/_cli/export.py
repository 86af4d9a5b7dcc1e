"""``snugfit export``: a finished run's model as plain files."""

from __future__ import annotations

from snugfit._cli.child_process import make_job, run_job
from snugfit._cli.options import SHOW_ALL, OutputOptions
from snugfit._cli.output import SCHEMA, note, print_json
from snugfit._core.option_groups import ExportFormat
from snugfit._core.options import Workers
from snugfit._storage.outputs import require_folder


def export(
    run: str,
    /,
    *,
    format: ExportFormat = "both",
    out: str | None = None,
    check: bool = True,
    threads: Workers | None = None,
    output: OutputOptions = SHOW_ALL,
) -> None:
    """Write a finished run's model as safetensors and ONNX, and print the paths of the files.

    For example:

    ```
    snugfit export runs/first --out deploy/
    ```

    Args:
        run: folder of a finished run, as printed by `snugfit train`.
        format: what to write; both writes both.
        out: where to write; the run folder by default.
        check: run the ONNX file and compare its outputs with the model's.
        threads: compute threads; all cores by default, or OMP_NUM_THREADS.
        output: what is shown.
    """
    if out is not None:
        require_folder(out)
    job = make_job("export", output, threads, run=run, out=out, format=format, check=check)
    result = run_job(job)
    if result.get("onnx_max_difference") is not None:
        note(f"largest difference between the ONNX outputs and the model's: {result['onnx_max_difference']:.3g}")
    if output.json:
        print_json({"schema": SCHEMA, "run_dir": run, **result})
    else:
        print("\n".join(str(path) for path in result["files"]))
