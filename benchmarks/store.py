"""Result files: written after every cell, so that a benchmark can be stopped and continued; and markdown tables."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import EXCEEDED, INFEASIBLE, ROOT, Cell, Options, Settings, to_flags, train
from benchmarks.machine import commit, describe_machine, slug
from snugfit._storage.files import write_json_atomic

RESULTS = ROOT / "benchmarks" / "results"
_PRIVATE = {"--data-dir", "--results", "--work", "--weights", "--source", "--python"}


class ResultFile:
    """The cells of one claim on one machine, ``results/<claim>_<hardware>_<date>.json``.

    A cell is found again by its ``command`` and ``repeat``; what failed, other than by an infeasible budget or a model
    that a strategy cannot serve, is run again. Several processes may fill one file at the same time.

    Args:
        claim: what the file is about.
        options: where it is, and what is run again.
        failed: whether a cell shows a defect. It is run again at another commit, which may have mended it.
    """

    def __init__(self, claim: str, options: Options, failed: Callable[[Cell], bool] = lambda _: False) -> None:
        self.options, self._failed, machine = options, failed, describe_machine(options.device)
        name = f"{claim}_{slug(machine)}_{time.strftime('%Y-%m-%d')}.json"
        self.path = options.results or RESULTS / name
        self.data: dict[str, Any] = {"claim": claim, "machine": machine, "commands": [], "cells": []}
        if self.path.exists():
            self.data = json.loads(self.path.read_text())
        command = _own_command(claim)
        if command not in self.data["commands"]:
            self.data["commands"].append(command)
        self._rerun: set[tuple[str, int]] = set()

    @property
    def cells(self) -> list[Cell]:
        """What was measured so far."""
        return list(self.data["cells"])

    def has(self, command: str, repeat: int = 0) -> bool:
        """Whether there is a cell of a command that needs no other try."""
        found = self._find(command, repeat)
        return found is not None and self._final(found) and not self._again(command, repeat)

    def once(self, command: str, work: Callable[[], Cell], repeat: int = 0, **labels: Any) -> Cell:
        """The stored cell of a command, or that of ``work()``, which is stored.

        Args:
            command: what is run; identifies the cell together with ``repeat``.
            work: runs it.
            repeat: number of the repetition.
            labels: what tables need to know of it.
        """
        if self.has(command, repeat):
            return dict(self._find(command, repeat) or {})
        note(f"{time.strftime('%H:%M:%S')} {command}")
        return self.put(command, {**labels, **work()}, repeat)

    def train(self, settings: Settings, repeat: int = 0, *, keep: bool = False, **labels: Any) -> Cell:
        """The stored cell of ``snugfit train`` with these flags, or that of a new run, whose folder may be kept."""
        command = " ".join(["snugfit", "train", *to_flags(settings)])
        return self.once(command, lambda: train(settings, self.options, keep), repeat, **labels, settings=settings)

    def put(self, command: str, found: Cell, repeat: int = 0) -> Cell:
        """Store what a command found, in place of what is stored of it; the commit is the present one by default."""
        cell = {"command": command, "repeat": repeat, "commit": commit(), **found}
        self._keep(cell)
        note(f"         {summary(cell)}")
        return cell

    def _keep(self, cell: Cell) -> None:
        """Put a cell into the file, in the place of an older one, beside what other processes have put there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent):
            if self.path.exists():
                commands, self.data = self.data["commands"], json.loads(self.path.read_text())
                self.data["commands"] += [each for each in commands if each not in self.data["commands"]]
            older = self._find(cell["command"], cell["repeat"])
            if older is not None:
                self.data["cells"].remove(older)
            self.data["cells"].append(cell)
            write_json_atomic(self.path, self.data)

    def _find(self, command: str, repeat: int) -> Cell | None:
        same = (cell for cell in self.data["cells"] if (cell["command"], cell["repeat"]) == (command, repeat))
        return next(same, None)

    def _final(self, cell: Cell) -> bool:
        """Whether a cell needs no other try; one that timed out gets it with a longer time limit only."""
        if self._failed(cell) and cell["commit"] != commit():
            return False
        if "exit_code" in cell and cell["exit_code"] is None:
            return bool(self.options.timeout <= cell["seconds"])
        unserved = cell.get("error", {}).get("type") == "ModelError"
        return unserved or cell.get("exit_code", 0) in (0, INFEASIBLE, EXCEEDED)

    def _again(self, command: str, repeat: int) -> bool:
        """Whether ``--again`` asks for the cell; once per invocation, since a cell may be asked for twice."""
        if not self.options.again or (command, repeat) in self._rerun:
            return False
        self._rerun.add((command, repeat))
        return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context in which no other benchmark writes into a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def summary(cell: Cell) -> str:
    """One line on how a run went."""
    if "record" in cell:
        measured, predicted = cell["record"].get("measured", {}), cell["record"].get("predicted", {})
        peaks = f"{mb(measured.get('peak_bytes'))} of {mb(predicted.get('peak_bytes'))} MB predicted"
        trained = f", accuracy {percent(accuracy(cell))}" if "accuracy" in cell["record"] else ""  # a plan has none
        return f"{cell['seconds']:.1f} s, {peaks}{trained}"
    if "error" in cell:
        return f"exit {cell['exit_code']}: {cell['error']['message'].splitlines()[0]}"
    if "exit_code" in cell:
        return "timed out" if cell["exit_code"] is None else f"exit {cell['exit_code']}"
    return "done"


def succeeded(cells: Iterable[Cell]) -> list[Cell]:
    """The cells that finished with a record."""
    return [cell for cell in cells if cell.get("exit_code") == 0 and "record" in cell]


def accuracy(cell: Cell) -> float | None:
    """Test accuracy in [0, 1] of a finished run, or that on the validation split where there is no test."""
    values = cell["record"]["accuracy"]
    found = values["test"] if values["test"] is not None else values["val"]
    return None if found is None else float(found)


def middle(values: Iterable[float | None]) -> float | None:
    """Median of what is there; None of nothing."""
    there = [value for value in values if value is not None]
    return median(there) if there else None


def mb(count: float | None) -> str:
    """Bytes as a number of MB."""
    return "-" if count is None else f"{count / 1e6:.1f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share as text."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def number(value: float | None, digits: int = 2) -> str:
    """A number as text."""
    return "-" if value is None else f"{value:.{digits}f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(item) for item in line) + " |" for line in lines)


def finish(results: ResultFile, render: Callable[[list[Cell]], str]) -> None:
    """Print a benchmark's tables, and where its results are."""
    print(render(results.cells))
    note(f"results: {results.path}")


def note(message: str) -> None:
    """Print a line on stderr."""
    print(message, file=sys.stderr, flush=True)


def _own_command(claim: str) -> str:
    """This script's command line, without folders of this machine."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word.partition("=")[0] not in _PRIVATE:
            kept.append(word)
        elif "=" not in word:
            next(words, None)
    shown = [word for word in kept if word != "--again"]
    return shlex.join(["python", "-m", f"benchmarks.{claim}", *shown])


def load(path: Path) -> dict[str, Any]:
    """Read a result file."""
    return dict(json.loads(path.read_text()))
