"""Trials: short real runs of a plan's candidates, each in a fresh process if the request can be sent there."""

from __future__ import annotations

import contextlib
import copy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from snugfit._core.option_groups import FROM_PYTHON
from snugfit._core.plan import Candidate
from snugfit._core.record import Record, Trial
from snugfit._core.registry import strategy_class
from snugfit._core.serial import from_data
from snugfit._data import ImageSet, Subset
from snugfit._engine.builder import Assembly, assemble, load_splits
from snugfit._engine.planning import Planned
from snugfit._engine.running import execute, write_run
from snugfit._planner import corrected
from snugfit._planner.kept_memory import with_kept_memory
from snugfit._report.metrics import read_metrics
from snugfit._storage.run_folder import read_data
from snugfit._training.events import Notice, Subscriber
from snugfit._training.strategy import Strategy
from snugfit.errors import InterruptedRunError, SnugfitError, first_line

_EVALUATED = 16
"""Validation images of a trial, and test images: few, because a trial times training."""
_GRACE_SECONDS = 20.0


def compare(planned: Planned, steps: int, subscribers: Sequence[Subscriber]) -> list[Trial]:
    """Run a short trial of the best feasible candidate of every strategy, one after another.

    Each takes ``steps`` effective batches, and ``subscribers`` receive a notice of it. A trial that fails has its error
    in its row. Files of trials are removed, also after an interruption.
    """
    request = planned.assembly.request
    if not request.from_python:
        request.budget.check_trials()
    best: dict[str, Candidate] = {}
    for candidate in planned.plan.candidates:
        if candidate.feasible:
            best.setdefault(candidate.strategy, candidate)
    trials = []
    with tempfile.TemporaryDirectory(prefix="snugfit-trials-", ignore_cleanup_errors=True) as folder, _stoppable():
        short = replace(planned, assembly=_shortened(planned.assembly, steps))
        for number, (name, candidate) in enumerate(best.items(), 1):
            for subscriber in subscribers:
                subscriber(
                    Notice(f"trial {number} of {len(best)}: {name}, {short.assembly.workload.train_count} images")
                )
            trials.append(_trial(candidate, short, Path(folder) / name))
    return trials


def _shortened(assembly: Assembly, steps: int) -> Assembly:
    """The same assembly with a few batches, one epoch, and few images to evaluate."""
    request, splits = assembly.request, assembly.splits
    most, given = steps * assembly.workload.batch_size, request.data.max_val
    data = replace(
        request.data,
        max_train=min(most, request.data.max_train or most),
        max_val=_EVALUATED if given is None else min(_EVALUATED, given),
    )
    weights = ",".join(map(repr, assembly.workload.class_weights)) or None  # those of all training images
    training = replace(request.training, epochs=1, warmup_epochs=0.0, class_weights=weights)
    machine = replace(request.machine, out=None, profile_cache="off")
    request, own = replace(request, data=data, training=training, machine=machine), replace(assembly.own, metrics={})
    if data.data != FROM_PYTHON:
        return assemble(request, load_splits(request), assembly.module, own)
    test = None if splits.test is None else _first(splits.test, _EVALUATED)
    splits = replace(splits, train=_first(splits.train, most), val=_first(splits.val, _EVALUATED), test=test)
    return assemble(request, splits, assembly.module, own)


def _first(images: ImageSet, count: int) -> ImageSet:
    return Subset(images, np.arange(min(count, len(images))))


def _trial(candidate: Candidate, short: Planned, folder: Path) -> Trial:
    """Predict the cost of a candidate for the trial's work, run it, and return the measurements, or the error."""
    strategy: Strategy = from_data(strategy_class(candidate.strategy), candidate.settings)
    plan, workload = short.plan, short.assembly.workload
    cost = corrected(strategy.estimate(workload, short.profile, plan.hardware), candidate.correction)
    own = with_kept_memory(replace(plan, workload=workload, candidates=(replace(candidate, predicted=cost),), chosen=0))
    planned = replace(short, plan=own)
    seconds = float(sum(phase.seconds for phase in cost.phases))
    budget, images = plan.budget.memory_bytes, workload.train_count
    peak = (own.candidates[0].predicted or cost).peak_bytes
    trial = Trial(candidate.strategy, images, workload.epochs, budget, peak, seconds)
    request, error = short.assembly.request, None
    try:
        if request.from_python:
            _run_in_process(planned, folder)
        else:
            error = _run_in_child(planned, candidate.processes, folder)
    except InterruptedRunError:
        raise
    except (SnugfitError, RuntimeError, MemoryError, OSError) as failure:
        error = first_line(failure)
    if (folder / "record.json").exists():
        return replace(trial, error=error, **_measurements(folder))
    return replace(trial, error=error or "it wrote no record")


def _run_in_process(planned: Planned, folder: Path) -> None:
    """Train in this process, on a copy of the caller's module, because a run empties the module."""
    assembly = planned.assembly
    copied = replace(assembly, module=copy.deepcopy(assembly.module))
    execute(replace(planned, assembly=copied), (), folder)


def _run_in_child(planned: Planned, processes: int, folder: Path) -> str | None:
    """Train in a fresh process, as ``train --resume`` does; returns its error."""
    folder.mkdir()
    write_run(folder, planned)
    launch = ["cluster", "launch", "--processes", str(processes), "--max-restarts", "0", "--"]
    train = ["train", "--resume", str(folder), "--quiet"]
    code, output = _run_command([sys.executable, "-m", "snugfit", *(launch if processes > 1 else []), *train])
    return None if code == 0 else _error_in(output) or f"it ended with code {code}"


def _measurements(folder: Path) -> dict[str, Any]:
    """Predicted and measured figures of a run's training phases.

    The median step time excludes kernel generation, which is negligible in a long run.
    """
    record, before = read_data(Record, folder / "record.json"), 0.0
    steps: dict[str, list[float]] = {}
    for row in read_metrics(folder / "metrics.csv"):
        if "step" in row.values:
            now = row.values["seconds"]
            steps.setdefault(row.phase, []).append(now - before)
            before = now
    phases = [phase for phase in record.phases if phase.name in steps]
    return {
        "predicted_seconds": float(sum(phase.predicted_seconds for phase in phases)),
        "measured_peak_bytes": int(record.measured["peak_bytes"]),
        "measured_seconds": float(sum(len(steps[each.name]) * float(np.median(steps[each.name])) for each in phases)),
    }


def _error_in(output: str) -> str | None:
    """The last error that a process printed."""
    errors = [line.partition("error: ")[2] for line in output.splitlines() if "error: " in line]
    return errors[-1] if errors else None


def _run_command(command: Sequence[str]) -> tuple[int, str]:
    """Run a command to its end, or until this is interrupted; returns its exit code and its stderr."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output, start_new_session=True
        )
        try:
            code = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_GRACE_SECONDS)
                child.kill()
                child.wait()
        output.seek(0)
        return code, output.read()


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """A SIGTERM ends trials as a Ctrl-C does, so that their files are removed."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
