"""Runs trials in a process that is watched, and tells what failed."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.common import ROOT

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
PER_PROCESS = 400
"""Trials of one process, so that none inherits much of those before it."""
_IDLE = 0.005
"""Share of a processor below which a process waits for something other than the processor."""


@dataclass(frozen=True)
class Trial:
    """One trial: damage by a seed (none where it is below 0), or a failure that was kept.

    Attributes:
        reader: name of the reader.
        seed: what the damage is drawn from.
        kept: folder of a kept failure beside the good files.
    """

    reader: str
    seed: int
    kept: str | None = None

    @property
    def line(self) -> str:
        """The trial as the process takes it."""
        return json.dumps([self.reader, self.seed, *([self.kept] if self.kept else [])])


@dataclass(frozen=True)
class Failure:
    """A trial that failed, and how."""

    trial: Trial
    reason: str


def kept_trials(readers: Iterable[str], corpus: Path = CORPUS) -> list[Trial]:
    """The good files of every reader, and the failures that were kept of it."""
    found = []
    for reader in readers:
        folders = sorted(path.name for path in (corpus / reader).iterdir() if path.name != "good")
        found += [Trial(reader, -1), *(Trial(reader, 0, name) for name in folders)]
    return found


def hunt(
    trials: Iterable[Trial], seconds: float, corpus: Path = CORPUS, module: str = "benchmarks.fuzz.readers"
) -> Iterator[Failure | None]:
    """Run trials and give a failure, or None, for each; a trial may take so many seconds.

    The readers are those of a module's ``READERS``.
    """
    process: _Process | None = None
    try:
        for count, trial in enumerate(trials):
            if process is None or count % PER_PROCESS == 0:
                _close(process)
                process = _Process(corpus, module)
            reason = process.run(trial, seconds)
            if process.ended:
                process = _close(process)
            yield Failure(trial, reason) if reason else None
    finally:
        _close(process)


def _close(process: _Process | None) -> None:
    if process is not None:
        process.close()


class _Process:
    """A process that runs trials, and a thread that reads its answers."""

    def __init__(self, corpus: Path, module: str) -> None:
        command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.fuzz.trials", str(corpus), module]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="backslashreplace",
        )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        self._said: list[str] = []
        self.ended = self._started = False
        for stream, take in ((self._process.stdout, self._answers.put), (self._process.stderr, self._keep)):
            threading.Thread(target=self._read, args=(stream, take), daemon=True).start()

    def _read(self, stream: Iterable[str], take: object) -> None:
        with contextlib.suppress(ValueError):  # closed
            for line in stream:
                take(line)  # type: ignore[operator]
        take("")  # type: ignore[operator]

    def _keep(self, line: str) -> None:
        self._said = [*self._said[-60:], line]

    def run(self, trial: Trial, seconds: float) -> str:
        """What is wrong with a trial; the process is over where ``ended`` says so."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(trial.line + "\n")
            self._process.stdin.flush()
            self._next_answer(seconds if self._started else seconds + 120)  # imports
            self._started = True
            answer = self._next_answer(seconds)
        except queue.Empty:
            self.close()
            return f"hangs: no answer within {seconds:g} s"
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.close()
            return f"ends the process with {self._process.returncode}: {''.join(self._said[-40:])}"
        kind, *reason = json.loads(answer)
        return "" if kind == "good" else str(reason[0])

    def _next_answer(self, seconds: float) -> str:
        """The next line of the process; on a busy machine it may take longer than ``seconds``, and is no hang.

        Raises:
            queue.Empty: none came, though the process had so many seconds of a processor, or did nothing meanwhile.
        """
        began = spent = _processor_seconds(self._process.pid)
        while True:
            try:
                return self._answers.get(timeout=seconds)
            except queue.Empty:
                before, spent = spent, _processor_seconds(self._process.pid)
                if spent - before < _IDLE * seconds or spent - began >= seconds:
                    raise

    def close(self) -> None:
        """End the process."""
        self.ended = True
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()


def _processor_seconds(pid: int) -> float:
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:2]))
    except psutil.Error:
        return 0.0
