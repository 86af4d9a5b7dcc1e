"""``snugfit evaluate``: the accuracy, or mAP50, of a finished run's model."""

from __future__ import annotations

from typing import Any

from snugfit._cli.child_process import make_job, run_job
from snugfit._cli.options import SHOW_ALL, OutputOptions
from snugfit._cli.output import SCHEMA, print_json
from snugfit._core.option_groups import Split
from snugfit._core.options import Workers


def evaluate(
    run: str,
    /,
    *,
    data: str | None = None,
    data_dir: str | None = None,
    split: Split | None = None,
    threads: Workers | None = None,
    output: OutputOptions = SHOW_ALL,
) -> None:
    """Measure the accuracy of a finished run's model, or mAP50 if it detects objects.

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
    job = make_job("evaluate", output, threads, run=run, data=data, data_dir=data_dir, split=split)
    result = run_job(job)
    if output.json:
        print_json({"schema": SCHEMA, "run_dir": run, **result})
    else:
        print("\n".join(summary(result)))


def summary(result: dict[str, Any]) -> list[str]:
    """Lines like ``accuracy  91.3 %``, then one line per class."""
    names = ("map50",) if "map50" in result else ("accuracy", "top5")
    lines = [f"{'mAP50' if name == 'map50' else name:8}  {_percent(result.get(name))}" for name in names]
    lines.append(f"images    {result.get('count', '-')}")
    classes = result.get("per_class") or {}
    width = max((len(str(name)) for name in classes), default=0)
    return lines + [f"  {str(name).ljust(width)}  {_percent(value)}" for name, value in classes.items()]


def _percent(value: Any) -> str:
    return f"{100 * value:.2f} %" if isinstance(value, (int, float)) else "-"
