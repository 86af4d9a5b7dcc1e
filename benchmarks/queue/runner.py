"""One run: ``snugfit train`` in a child process, continued where an earlier queue left it, and kept as a row."""

from __future__ import annotations

import csv
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import INFEASIBLE, ROOT, last_json, to_flags
from benchmarks.machine import commit
from benchmarks.queue.curves import curve_of
from benchmarks.queue.rungs import RUNGS, Row, Task
from snugfit._cli.startup import keep_niceness
from snugfit._storage.files import write_json_atomic

INTERRUPTED, UNREADABLE = 130, 4
_PR_SET_PDEATHSIG = 1
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/'\"]+/)+")
"""Folders of this machine in a message; a row names none."""
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Place:
    """Where runs find things.

    Attributes:
        runs: folder of the run folders, outside of the repository or ignored by it.
        data_dir: where data sets are; SNUGFIT_DATA otherwise.
        weights: file of each name that arms give as ``weights``.
        lock: descriptor of the queue's lock, which a run holds too until it ends.
        device: where to train; the default of ``snugfit train`` if None.
        context_mb: MB of a GPU at rest, which memory caps have on top.
        program: starts snugfit.
    """

    runs: Path
    data_dir: str | None
    weights: dict[str, Path]
    lock: int | None = None
    device: str | None = None
    context_mb: int = 0
    program: tuple[str, ...] = (sys.executable, "-m", "snugfit")


class Runner:
    """Runs tasks, also in several threads; :meth:`stop` may come from a signal handler."""

    def __init__(self, place: Place) -> None:
        self.place, self.stopped = place, False
        self._children: list[subprocess.Popen[bytes]] = []

    def stop(self) -> None:
        """Let the runs that go on save a checkpoint and end."""
        self.stopped = True
        for child in list(self._children):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)

    def __call__(self, task: Task, digest: str) -> Row | None:
        """Run a task to its end, and delete its folder, or keep it as ``KEY.failed`` where the run failed.

        Args:
            task: what to run.
            digest: of the sources as they are; a run that was begun with others starts again.

        Returns:
            The row; None where the run was interrupted.
        """
        folder = self.place.runs / task.key
        begun = _begin(folder, digest)
        code, output = self._attempt(task, folder)
        if code == UNREADABLE and output.get("error", {}).get("type") == "CheckpointError":
            shutil.rmtree(folder, ignore_errors=True)
            code, output = self._attempt(task, folder)
        if code == INTERRUPTED or self.stopped:
            return None
        row = row_of(task, digest, begun["commit"], code, output, metrics_of(folder)) | {"load": begun.get("load")}
        failed = folder.with_suffix(".failed")
        shutil.rmtree(failed, ignore_errors=True)
        if code not in (0, INFEASIBLE) and folder.is_dir():
            folder.rename(failed)
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".json").unlink()
        return row

    def _attempt(self, task: Task, folder: Path) -> tuple[int, dict[str, Any]]:
        """Start or continue a run; returns its exit code and what it said as JSON."""
        if (folder / "record.json").is_file():  # it finished while no queue was there to see
            return 0, json.loads((folder / "record.json").read_text())
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self.place.data_dir:
            environment["SNUGFIT_DATA"] = self.place.data_dir
        with tempfile.TemporaryFile() as said:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
            try:
                if self.stopped:
                    return INTERRUPTED, {}
                child = subprocess.Popen(
                    self._command(task, folder), stdout=said, env=environment, cwd=ROOT, start_new_session=True,
                    preexec_fn=_prepare_child,  # noqa: PLW1509  (it takes no lock that another thread may hold)
                    pass_fds=() if self.place.lock is None else (self.place.lock,),
                )  # fmt: skip
                self._children.append(child)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if self.stopped:
                child.send_signal(signal.SIGTERM)  # `stop` may have come before the child was listed
            code = child.wait()
            self._children.remove(child)
            said.seek(0)
            return code, last_json(said.read().decode())

    def _command(self, task: Task, folder: Path) -> list[str]:
        place = {} if self.place.device is None else {"device": self.place.device}
        if task.arm.is_peer:  # it saves no checkpoint, and starts again
            flags = {name: value for name, value in task.settings.items() if name != "strategy"}
            return [sys.executable, "-m", task.arm.settings["strategy"], *to_flags(flags | place)]
        train = [*self.place.program, "train", "--json", "--quiet"]
        if (folder / "request.json").is_file():
            return [*train, "--resume", str(folder)]
        shutil.rmtree(folder, ignore_errors=True)
        settings = task.settings | place
        if "memory" in settings and self.place.context_mb:
            settings["memory"] = f"{float(settings['memory'].removesuffix('MB')) + self.place.context_mb:g}MB"
        if "weights" in settings:
            settings["weights"] = self.place.weights[settings["weights"]]
        return [*train, *to_flags(settings), "--out", str(folder)]


def _prepare_child() -> None:
    """In the child: unblock signals, keep the niceness, and let a killed queue ask for a checkpoint."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    keep_niceness()


def _begin(folder: Path, digest: str) -> dict[str, Any]:
    """Note which sources a run is begun with; delete what was begun with others."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    note = folder.with_suffix(".json")
    begun = json.loads(note.read_text()) if note.is_file() else {}
    if begun.get("digest") != digest or not folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        begun = {"digest": digest, "commit": commit(), "started": time.time(), "load": round(os.getloadavg()[0], 2)}
        write_json_atomic(note, begun)
    return begun


def training_seconds(folder: Path) -> float | None:
    """Seconds of training steps that a run folder tells of so far; None for none."""
    return _seconds(metrics_of(folder))


def _seconds(metrics: list[dict[str, str]]) -> float | None:
    return float(metrics[-1]["seconds"]) if metrics and metrics[-1].get("seconds") else None


def metrics_of(folder: Path) -> list[dict[str, str]]:
    """Lines of a run folder's metrics.csv, none where there is no such file."""
    metrics = folder / "metrics.csv"
    return list(csv.DictReader(metrics.read_text().splitlines())) if metrics.is_file() else []


def best_epoch(metrics: list[dict[str, str]]) -> dict[str, Any] | None:
    """The last epoch of the best validation accuracy (counted from 1, within its phase); None where none was told."""
    told = [each for each in reversed(metrics) if each.get("val_accuracy")]
    best = max(told, key=lambda each: float(each["val_accuracy"]), default=None)
    if best is None:
        return None
    return {"phase": best.get("phase"), "epoch": int(best["epoch"]) + 1, "val": float(best["val_accuracy"])}


def row_of(
    task: Task, digest: str, commit: str, code: int, output: dict[str, Any], metrics: list[dict[str, str]]
) -> Row:  # fmt: skip
    """What is kept of a run."""
    found = output if code == 0 else {}
    measured, accuracy = found.get("measured", {}), found.get("accuracy", {})
    trained = (_seconds(metrics) or found.get("training_seconds")) if code == 0 else None
    return {
        "key": task.key, "experiment": task.arm.experiment, "arm": task.arm.name, "rung": RUNGS[task.rung],
        "images": task.images, "epochs": task.epochs, "seed": task.seed, "lr": task.lr, "settings": task.settings,
        "commit": commit, "digest": digest, "exit_code": code,
        "error": _FOLDERS.sub("", output.get("error", {}).get("message", "")) or None,
        "val": accuracy.get("val"), "test": accuracy.get("test"), "seconds": measured.get("seconds"),
        "best_epoch": best_epoch(metrics), "kept": found.get("kept"),
        "curve": found.get("curve") or curve_of(found, metrics),
        "training_seconds": trained, "peak_bytes": measured.get("peak_bytes"),
        "parameters": found.get("parameters"), "exit": found.get("exit"), "chosen": found.get("settings"),
        "workload": found.get("workload"),
    }  # fmt: skip
