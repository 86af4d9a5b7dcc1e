"""Claim: equal measurements, equal weights: a run of ``elastic`` that is killed ends like one that is not.

What a selection follows from is measured: the times of operators before training, and again where steps drift. What
was measured is written into the run folder, and is not measured again. So the uninterrupted run that a killed one is
compared with must begin from the same measurements: a run is killed at a random moment, its folder is copied, one copy
goes on undisturbed, and the other is killed several times more and resumed. Busy loops beside both keep steps from
taking the time that was predicted. Where only one of the two finds that steps have drifted, it measures anew, and the
two no longer have the same measurements; such trials are counted apart.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import DEFAULTS, Cell, Options, Settings, program
from benchmarks.soak_faults import LOST
from benchmarks.soak_runs import Command, Hung, Place, orphans, resume, start, weights_of
from benchmarks.store import ResultFile, finish, markdown, note

_SETTINGS: Settings = {
    "model": "mobilenet_v2", "image_size": 64, "max_train": 128, "max_val": 40, "batch_size": 16, "epochs": 6,
    "strategy": "elastic", "time_ratio": 0.5, "interval": 1, "memory": "250MB", "threads": 1,
}  # fmt: skip
_START_SECONDS = 300.0
_SPREAD_SECONDS = 6.0
"""The first kill comes this long after the first checkpoint, at most."""
_MOST_KILLS = 4

app = program("resumes")


@app.default
def main(*, weights: Path, trials: int = 12, seed: int = 0, options: Options = DEFAULTS) -> int:
    """Kill and resume runs on a busy machine; exits with 1 where one ended with other weights.

    For example: python -m benchmarks.resumes --data folder:flower_photos --weights mobilenet_v2.safetensors

    Args:
        weights: pre-trained weights of MobileNetV2, which make tensors worth selecting.
        trials: how many.
        seed: of the trials.
        options: what every benchmark takes; the batch size is not used.
    """
    results = ResultFile("resumes", options, failed)
    for number in range(trials):
        with tempfile.TemporaryDirectory(dir=options.work, prefix="resumes-") as name:
            place = Place(Path(name), options.data_dir)
            settings = {**_SETTINGS, "data": options.data, "weights": str(weights.absolute())}
            trial = Trial(place, settings, random.Random(f"{seed} {number}"))
            cell = results.once(f"{options.data}, seed {seed}, trial {number}", trial.run, data=options.data)
        note(f"         {row(cell)} {'; '.join(cell['failures'])}")
    finish(results, render)
    return int(any(failed(cell) for cell in results.cells))


def failed(cell: Cell) -> bool:
    """Whether a trial ended otherwise than it should."""
    return bool(cell["failures"])


class Trial:
    """One run, its copy, and what becomes of both."""

    def __init__(self, place: Place, settings: Settings, draw: random.Random) -> None:
        self.place, self.settings, self.draw = place, settings, draw
        self.failures: list[str] = []
        self.kills: list[str] = []

    def run(self) -> Cell:
        """Kill, copy, let one go on, kill the other, and compare."""
        busy = self.draw.randint(2, 3)
        whole, killed = self.place.folder / "whole", self.place.folder / "killed"
        ends: list[dict[str, Any]] = []
        with busy_loops(busy):
            try:
                self._begin(whole)
                shutil.copytree(whole, killed)
                seconds = self._goes_on(whole)
                for _ in range(self.draw.randint(2, _MOST_KILLS)):
                    self._killed(killed, self.draw.uniform(0.15, 0.6) * seconds)
                if not (killed / "record.json").is_file():
                    self._goes_on(killed)
                ends = [json.loads((run / "record.json").read_text()) for run in (whole, killed)]
                self.failures += compared(whole, killed, ends)
            except Hung as error:
                self.failures.append(str(error))
        if orphans(self.place):
            self.failures.append("processes live on")
        intervals = [[interval_facts(each) for each in record["intervals"]] for record in ends]
        return {"busy": busy, "kills": self.kills, "intervals": intervals, "failures": self.failures}

    def _begin(self, run: Path) -> None:
        """Train until some time after the first checkpoint, and kill."""
        command, deadline = start(self.place, self.settings, run), time.monotonic() + _START_SECONDS
        while not any((run / "checkpoint").glob("*/*")) and command.after(0.05):
            if time.monotonic() > deadline:
                break
        self._kill(command, run, self.draw.uniform(0.0, _SPREAD_SECONDS))

    def _killed(self, run: Path, seconds: float) -> None:
        if not (run / "record.json").is_file():
            self._kill(resume(self.place, self.settings, run), run, seconds)

    def _kill(self, command: Command, run: Path, seconds: float) -> None:
        to_worker = self.draw.random() < 0.5
        hit = command.after(seconds) and command.send(signal.SIGKILL, to_worker)
        code = command.ends()
        if hit:
            self.kills.append(f"epoch {epochs_done(run)}")
        if code not in (allowed_codes(to_worker) if hit else {0}):
            self._complain(command, code)

    def _complain(self, command: Command, code: int) -> None:
        said = command.said.strip().replace(str(self.place.folder), "WORK")
        self.failures.append(f"exit code {code}: {said[-300:]}")

    def _goes_on(self, run: Path) -> float:
        """Resume to the end; seconds that it takes."""
        started = time.monotonic()
        command = resume(self.place, self.settings, run)
        if (code := command.ends()) != 0:
            self._complain(command, code)
            raise Hung("a resumed run did not come to its end")
        return time.monotonic() - started


def allowed_codes(to_worker: bool) -> set[int]:
    """Exit codes of a command that is killed, or whose trainer is; 0 where that had done its work by then."""
    return {0, LOST if to_worker else -signal.SIGKILL}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Context in which other processes keep a machine busy."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def epochs_done(run: Path) -> int:
    """Epochs that a run folder has begun a line of, before the present one."""
    path = run / "metrics.csv"
    rows = path.read_text().splitlines()[1:] if path.is_file() else []
    return max((int(row.split(",")[1]) for row in rows if row.count(",") > 2), default=0)


def interval_facts(interval: dict[str, Any]) -> dict[str, Any]:
    """What a table needs to know of an interval."""
    times = {name: interval[f"{name}_seconds"] for name in ("predicted", "measured")}
    return {"tensors": len(interval["tensors"]), "drifted": interval["drifted"], **times}


def compared(whole: Path, killed: Path, ends: list[dict[str, Any]]) -> list[str]:
    """Complaints about two runs of the same measurements, that should have ended alike."""
    one, other = (record["intervals"] for record in ends)
    if [each["drifted"] for each in one] != [each["drifted"] for each in other]:
        return []
    found = []
    if [each["tensors"] for each in one] != [each["tensors"] for each in other]:
        found.append("other tensors were selected")
    if weights_of(whole) != weights_of(killed):
        found.append("the weights differ from those of the uninterrupted run")
    return found


def row(cell: Cell) -> tuple[str, ...]:
    """What a table says of a trial."""
    number = cell["command"].rpartition(" ")[2]
    if len(cell["intervals"]) < 2:
        return number, str(cell["busy"]), ", ".join(cell["kills"]), "-", "-", "-", "failed"
    one, other = cell["intervals"]
    slow = max(each["measured"] / each["predicted"] for each in [*one, *other])
    drift = [sum(each["drifted"] for each in run) for run in (one, other)]
    apart = [each["drifted"] for each in one] != [each["drifted"] for each in other]
    verdict = "failed" if cell["failures"] else "drift in one only" if apart else "equal"
    tensors = ", ".join(str(each["tensors"]) for each in one)
    return (
        number,
        str(cell["busy"]),
        ", ".join(cell["kills"]),
        tensors,
        f"{slow:.1f}",
        f"{drift[0]}, {drift[1]}",
        verdict,
    )


def render(cells: list[Cell]) -> str:
    """A row per trial, then how many ended alike."""
    header = ("trial", "busy loops", "killed in", "tensors selected by interval", "slowest steps over predicted",
              "drift found, whole and killed", "weights")  # fmt: skip
    rows = [row(cell) for cell in cells]
    equal, apart = (sum(each[-1] == verdict for each in rows) for verdict in ("equal", "drift in one only"))
    kills, twice = sum(len(cell["kills"]) for cell in cells), sum(len(cell["kills"]) > 1 for cell in cells)
    summary = (
        f"{len(cells)} trials, {kills} kills; the copy was killed too, before it ended, in {twice}. "
        f"{equal} ended with equal weights, {sum(map(failed, cells))} failed"
    )
    return f"{markdown(header, rows)}\n\n{summary}, {apart} found drift in one of the two runs only."


if __name__ == "__main__":
    raise SystemExit(app())
