"""The commands on a run: ``snugfit evaluate``, ``predict``, ``report``, ``export`` and ``verify``."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from cyclopts import Parameter

from snugfit._cli.child_process import make_job, run_job
from snugfit._cli.options import SHOW_ALL, OutputOptions
from snugfit._cli.output import FailedError, explain, note, unreported
from snugfit._core.option_groups import PLAIN_ONNX, ExportFormat, OnnxOptions, Split
from snugfit._core.options import Common, Count, Workers
from snugfit._core.record import PRECISIONS
from snugfit._core.serial import to_data
from snugfit._quantities import format_bytes
from snugfit._storage.outputs import require_file, require_folder, whole_file
from snugfit._storage.run_folder import Verification
from snugfit._storage.run_folder import verify as verify_files
from snugfit.errors import CheckpointError, DataError, UsageError

COLUMNS = ("path", "class", "probability", "left", "top", "right", "bottom")
"""The last four only if the model detects boxes."""
Run = Annotated[str, Common("", "folder of a run, as printed by snugfit train")]


def evaluate(
    run: Run,
    /,
    *,
    data: Annotated[str | None, Common("NAME", "data set or folder:PATH; the run's own by default")] = None,
    data_dir: str | None = None,
    split: Annotated[Split | None, Common("NAME", "train, val, test (by default) or all images")] = None,
    threads: Workers | None = None,
    output: OutputOptions = SHOW_ALL,
) -> None:
    """Measure the accuracy of a finished run's model; mAP of several labels, or mAP50 if it detects objects.

    For example:

    ```
    snugfit evaluate runs/first --data folder:photos --json
    ```

    Args:
        run: folder of a finished run, as printed by `snugfit train`.
        data: a data set's name, or `folder:PATH`; the run's own by default.
        data_dir: where data sets are (`SNUGFIT_DATA` otherwise).
        split: which images; by default the test split (for detection validation, if there is none), or all images of a
            folder other than the run's own.
        threads: compute threads; all cores by default, or OMP_NUM_THREADS.
        output: what is shown.
    """
    found = run_job(
        make_job(
            "evaluate", output, threads, arguments={"run": run, "data": data, "data_dir": data_dir, "split": split}
        )
    )
    output.show({"run_dir": run, **found}, "\n".join(summary(found)))


def summary(result: dict[str, Any]) -> list[str]:
    """Lines like ``accuracy  91.3 %``, then one line per class."""
    names = {key: name for key, name in PRECISIONS.items() if key in result} or {"accuracy": "accuracy", "top5": "top5"}
    lines = [f"{name:8}  {_percent(result.get(key))}" for key, name in names.items()]
    lines.append(f"images    {result.get('count', '-')}")
    classes = result.get("per_class") or {}
    width = max((len(str(name)) for name in classes), default=0)
    return lines + [f"  {str(name).ljust(width)}  {_percent(value)}" for name, value in classes.items()]


def _percent(value: Any) -> str:
    return f"{100 * value:.2f} %" if isinstance(value, (int, float)) else "-"


def predict(
    run: Run,
    folder: Annotated[str, Common("", "folder of images, or one image")],
    /,
    *,
    out: Annotated[str | None, Common("FILE", "CSV file to write; stdout by default")] = None,
    top: Annotated[Count | None, Common("N", "classes per image, the likeliest first; 1 by default")] = None,
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
        top: classes per image, the likeliest first, by default 1 (of several labels all that are likelier than not); or
            the most objects, by default all.
        threads: compute threads; all cores by default, or OMP_NUM_THREADS.
        output: what is shown.
    """
    if out is not None:
        require_file(out)
    job = make_job("predict", output, threads, arguments={"run": run, "images": folder, "top": top})
    if out is not None:
        output.show({"out": out, "rows": _to_file(job, out)}, out)
    elif output.json:
        rows: list[list[Any]] = []
        run_job(job, rows.append)
        output.show({"predictions": [dict(zip(COLUMNS, row, strict=False)) for row in rows]}, "")
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


def report(
    run: Run,
    /,
    *,
    pictures: Annotated[
        bool, Parameter(negative=""), Common("", "add pictures of what was learned, from the data set")
    ] = False,
    data: Annotated[str | None, Common("NAME", "data set of the pictures; the run's own by default")] = None,
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
    """
    if not pictures and (data, data_dir, threads) != (None, None, None):
        raise UsageError("--data, --data-dir and --threads are for the pictures of a report; add --pictures.")
    if pictures:
        drawn = run_job(
            make_job(
                "report", output, threads, arguments={"run": run, "pictures": True, "data": data, "data_dir": data_dir}
            )
        )
    else:
        drawn = {"report": _write_report(run)}
    for line in drawn.get("missing", ()):
        note(line)
    output.show(drawn, drawn["report"])


def draw_after_training(run_dir: str) -> str | None:
    """Draw the page of a run that is complete; warn if that fails.

    Raises:
        InterruptedRunError: a signal came while drawing.
    """
    try:
        return _write_report(run_dir)
    except KeyboardInterrupt as error:
        raise unreported(run_dir) from error
    except Exception as error:
        note(f"warning: the report was not drawn, {explain(error)}\n`snugfit report {quote(run_dir)}` tries again.")
        return None


def _write_report(run_dir: str) -> str:
    from snugfit._report.page import write_report

    return str(write_report(Path(run_dir)))


def export(
    run: Run,
    /,
    *,
    format: Annotated[ExportFormat, Common("NAME", "safetensors, onnx or both (by default)")] = "both",
    out: Annotated[str | None, Common("FOLDER", "where to write; the run folder by default")] = None,
    check: bool = True,
    threads: Workers | None = None,
    onnx: Annotated[OnnxOptions, Parameter(name="*", negative="")] = PLAIN_ONNX,
    output: OutputOptions = SHOW_ALL,
) -> None:
    """Write a finished run's model as safetensors and ONNX, and print the paths of the files.

    For example:

    ```
    snugfit export runs/first --out deploy/
    snugfit export runs/first --format onnx --int8 --out deploy/
    ```

    Args:
        run: folder of a finished run, as printed by `snugfit train`.
        format: what to write; both writes both.
        out: where to write; the run folder by default.
        check: run the ONNX file and compare its outputs with the model's.
        threads: compute threads; all cores by default, or OMP_NUM_THREADS.
        onnx: how ONNX files are written.
        output: what is shown.
    """
    onnx.check(format)
    if out is not None:
        require_folder(out)
    arguments = {"run": run, "out": out, "format": format, "check": check, **asdict(onnx)}
    found = run_job(make_job("export", output, threads, arguments=arguments))
    if found.get("onnx_max_difference") is not None:
        note(f"largest difference between the ONNX outputs and the model's: {found['onnx_max_difference']:.3g}")
    if "int8" in found:
        note(_int8_line(found["int8"]))
    output.show({"run_dir": run, **found}, "\n".join(found["files"]))


def _int8_line(found: dict[str, Any]) -> str:
    accuracies = f"{_percent(found['accuracy'])} of {found['count']} {found['split']} images"
    return f"in 8 bits: {accuracies}, {_percent(found['float_accuracy'])} before; {format_bytes(found['bytes'])}"


def verify(run: Run, /, *, output: OutputOptions = SHOW_ALL) -> int:
    """Compare every file of a run folder with the digest that was recorded when it was written.

    Names each file that is damaged, missing or extra; exits with 4 if one is damaged or missing.

    For example:

    ```
    snugfit verify runs/first
    ```

    Args:
        run: folder of a run, finished or not.
        output: what is shown.
    """
    found = verify_files(run)
    output.show({"sound": found.sound, **to_data(found)}, "\n".join(_lines(found)))
    return 0 if found.sound else CheckpointError.exit_code


def _lines(found: Verification) -> list[str]:
    lines = [f"damaged  {name}: it {words}" for name, words in found.damaged.items()]
    lines += [f"missing  {name}" for name in found.missing]
    lines += [f"extra    {name}" for name in found.extra]
    bad = len(found.damaged) + len(found.missing)
    state = f"{bad} of them not as written" if bad else "all as written"
    return [*lines, f"{found.files} files, {state}"]
