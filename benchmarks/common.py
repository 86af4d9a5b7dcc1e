"""What the benchmark scripts share: options, and running a command."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from cyclopts import App, Parameter

from snugfit._core.amounts import parse_bytes

ROOT = Path(__file__).resolve().parents[1]
INFEASIBLE, EXCEEDED = 3, 5
Settings = dict[str, Any]
Cell = dict[str, Any]
T = TypeVar("T")

_NAMED = re.compile(r"Smallest (?:budget|--total-memory) that would do: (\d[\d.]* ?\w+)")
_DROPPED = ("profile", "confusion", "class_names", "run_dir", "workload", "hardware")
_GRACE_SECONDS = 60.0


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """What every benchmark takes.

    Attributes:
        data: data set.
        data_dir: where data sets are; SNUGFIT_DATA otherwise.
        batch_size: effective batch size.
        device: cpu or cuda[:N]; cuda where there is one.
        threads: compute threads; all cores by default.
        timeout: seconds after which a single run is stopped and counts as timed out.
        again: run also what the result file has already.
        results: result file to continue; today's file of this machine by default.
        work: where run folders and caches go while they are needed; the system's temporary folder by default.
    """

    data: str = "cifar10"
    data_dir: str | None = None
    batch_size: int = 128
    device: str | None = None
    threads: int | None = None
    timeout: float = 7200.0
    again: bool = False
    results: Path | None = None
    work: Path | None = None

    def settings(self, **more: Any) -> Settings:
        """Settings of a run: these options that change what is measured, and ``more``."""
        shared = {name: getattr(self, name) for name in ("data", "batch_size", "device", "threads")}
        return {**shared, **more}


DEFAULTS = Options()


def program(name: str) -> App:
    """The command line of a script, ``python -m benchmarks.NAME``."""
    return App(
        name=f"python -m benchmarks.{name}",
        default_parameter=Parameter(consume_multiple=True, negative=""),
        help_format="plaintext",
        version_flags=[],
        result_action="return_value",
    )


def to_flags(settings: Mapping[str, Any]) -> list[str]:
    """``{"max_train": 64, "accumulate": False}`` as ``["--max-train", "64", "--no-accumulate"]``; None is left out."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            bare = name in ("memory", "total_memory") and str(value).isdecimal()  # as results hold it
            flags += [f"--{flag}", f"{value}B" if bare else str(value)]
    return flags


def run(
    module: Sequence[str], options: Options, extra: Sequence[str] = (), interpreter: str = sys.executable
) -> Cell:  # fmt: skip
    """Run ``python -m MODULE ...`` and parse the JSON object that it prints.

    Args:
        module: module and arguments, which identify the run.
        options: time limit and data folder.
        extra: further arguments, which do not.
        interpreter: Python that runs it; this one by default.

    Returns:
        ``exit_code`` (None after a time-out), ``seconds`` of the whole command, ``output`` (its JSON) and ``load``, the
        machine's load average when it began.
    """
    environment = dict(os.environ)
    if options.data_dir:
        environment["SNUGFIT_DATA"] = options.data_dir
    load, started = os.getloadavg()[0], time.perf_counter()
    process = subprocess.Popen(
        [interpreter, "-m", *module, *extra], stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True
    )
    try:
        text, _ = process.communicate(timeout=options.timeout)
    except subprocess.TimeoutExpired:
        text = stop(process)
    seconds = time.perf_counter() - started
    timed_out = seconds >= options.timeout
    code = None if timed_out else process.returncode
    return {"exit_code": code, "seconds": round(seconds, 3), "load": round(load, 2), "output": last_json(text)}


def context_flags(device: str) -> list[str]:
    """Command that tells what a device holds of a process at rest."""
    network = ["--model", "smallconv", "--input-shape", "3x16x16", "--classes", "10"]
    return ["snugfit", "plan", *network, "--strategy", "backprop", "--device", device, "--json"]


def context_of(device: str, options: Options) -> Cell:
    """What a device holds of a process at rest: a cell with ``context``, which is empty if no plan tells."""
    cell = run(context_flags(device), options)
    return {**cell, "context": (cell.pop("output", None) or {}).get("device_memory") or {}}


def context_megabytes(cell: Cell, device: str) -> int:
    """The context of a cell of :func:`context_of`, in whole MB upwards; SystemExit if it tells none."""
    if not cell["context"]:
        raise SystemExit(f"no plan on {device} says what its context takes")
    return int(-(-cell["context"]["context_bytes"] // 10**6))


def stop(process: subprocess.Popen[str]) -> str:
    """Ask a process to end, then make it; returns what it printed."""
    process.terminate()
    try:
        return process.communicate(timeout=_GRACE_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def last_json(text: str) -> dict[str, Any]:
    """The last JSON object of what a command printed, one to a line."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {}


def train(
    settings: Settings, options: Options, keep: bool = False, extra: Sequence[str] = (), resumes: bool = False
) -> Cell:  # fmt: skip
    """Run ``snugfit train``.

    Args:
        settings: its flags.
        options: time limit, folders.
        keep: leave the run folder (:func:`run_folder`) where it is.
        extra: further flags, which do not tell it from other runs.
        resumes: go on with an earlier run that was stopped, and keep the folder of one that is.

    Returns:
        What :func:`run` returns, with ``record`` or ``error`` in place of ``output``, ``training_seconds``: the
        training steps of all blocks and epochs alone, ``steps``: their number, and ``step_seconds``: their median.
    """
    folder = run_folder(settings, options)
    if resumes and (folder / "plan.json").exists():
        flags, place = ["--resume", str(folder)], []
    else:
        shutil.rmtree(folder, ignore_errors=True)
        flags, place = to_flags(settings), ["--out", str(folder)]
    cell = run(["snugfit", "train", *flags, "--json", "--quiet"], options, [*extra, *place])
    output = cell.pop("output")
    if "error" in output:
        cell["error"] = output["error"]
    elif output:
        cell["record"] = slim(output)
        steps = _step_seconds(folder / "metrics.csv")
        cell |= {"training_seconds": round(sum(steps), 4), "steps": len(steps), "step_seconds": median(steps)}
    if not keep and not (resumes and cell["exit_code"] is None):
        shutil.rmtree(folder, ignore_errors=True)
    return cell


def run_folder(settings: Settings, options: Options) -> Path:
    """Where a run of these settings puts its files."""
    work = options.work or Path(tempfile.gettempdir()) / "snugfit-benchmarks"
    key = hashlib.sha256(" ".join(to_flags(settings)).encode()).hexdigest()[:12]
    return work / key


def slim(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what is bulky or names this machine's folders; of the profile the lines over batch size stay."""
    lines = record.get("profile", {}).get("lines", {})
    kept = ("fixed_bytes", "sample_bytes", "residual_bytes", "sample_seconds")
    slimmer = {key: value for key, value in record.items() if key not in _DROPPED}
    if "settings" in slimmer:
        slimmer["settings"] = {key: value for key, value in slimmer["settings"].items() if key != "paging_folder"}
    return {**slimmer, "lines": {name: {key: line[key] for key in kept} for name, line in lines.items()}}


def _step_seconds(metrics: Path) -> list[float]:
    ends = [float(row["seconds"]) for row in csv.DictReader(metrics.read_text().splitlines()) if row["step"]]
    return [end - start for start, end in pairwise([0.0, *ends])]


def smallest_named(cell: Cell) -> int | None:
    """The smallest budget, in bytes, that an infeasible run's message names, of growth or in all."""
    found = _NAMED.search(cell.get("error", {}).get("message", ""))
    return parse_bytes(found.group(1)) if found else None


def alternate(items: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Every item ``repeats`` times, forwards and backwards in turn, so that drift of the machine meets all alike."""
    for repeat in range(repeats):
        for item in items if repeat % 2 == 0 else reversed(items):
            yield repeat, item
