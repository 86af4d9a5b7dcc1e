"""The launcher's connection to one host: its agent, started by ssh, the agent's reports, and the state of the host."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from snugfit.errors import UsageError

AGENT = "snugfit._cli.agent"
SSH_FAILED = 255


@dataclass(frozen=True)
class Start:
    """One command that starts the processes of a host; if ``remote``, its last argument is for the shell there."""

    host: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    remote: bool = False

    def __str__(self) -> str:
        """The command as typed in a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*words, shlex.join(self.command)])

    def after(self, pid: int | None) -> tuple[str, ...]:
        """The command, which first kills a silent agent with that process id, if one is left."""
        if pid is None or not self.remote:
            return self.command
        last = f"ps -o args= -p {pid} | grep -q {AGENT} && kill -9 {pid}; {self.command[-1]}"
        return (*self.command[:-1], last)


Reports = queue.Queue[tuple["Member", int, "dict[str, Any] | None"]]


class Member:
    """One host of a launch; ``on_line`` is called with every line that its workers print.

    Attributes:
        code: exit code of its agent; None while it runs.
        store: address at which it serves the store, if it does.
        reached: last round for which it reported whether it reaches the store, and whether it does.
        codes: exit codes of its workers after one has failed.
        done: whether its workers have ended well.
        age: seconds since it reached the store, by its last report; 0 if unknown.
    """

    def __init__(self, start: Start, reports: Reports, secret: str, on_line: Callable[[str], None]) -> None:
        self.start, self._reports, self._secret, self._on_line = start, reports, secret, on_line
        self._process: subprocess.Popen[str] | None = None
        self._generation, self.starts = 0, 0
        self._probed: tuple[int, int, int] | None = None
        self._pid: int | None = None
        self._forget()

    def _forget(self) -> None:
        self.code: int | None = None
        self.ready, self.done = False, False
        self.store: str | None = None
        self.reached, self.why = (-1, False), ""
        self.codes: list[int] = []
        self._heard = time.monotonic()
        self.age = 0.0

    def dial(self) -> None:
        """End an earlier agent and start one; raises UsageError if there is no such program here."""
        self.hang_up()
        self._forget()
        self.starts += 1
        command = self.start.after(self._pid)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                errors="surrogateescape",
                env={**os.environ, **self.start.environment},
                start_new_session=True,
            )
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"cannot run {command[0]}: {reason}. Install it; see --dry-run.") from error
        self.send("begin", secret=self._secret)
        listening = (self._process.stdout, self._generation)
        threading.Thread(target=self._listen, args=listening, daemon=True).start()

    def _listen(self, stream: IO[str], generation: int) -> None:
        for line in stream:
            report = None
            with contextlib.suppress(ValueError):
                report = json.loads(line)
            if not isinstance(report, dict) or not isinstance(report.get("said"), str):
                report = {"said": "?", "line": line}  # for people, like the greeting of a shell
            self._reports.put((self, generation, report))
        self._reports.put((self, generation, None))

    def send(self, order: str, **more: Any) -> None:
        """Send an order; a broken connection shows in the end of its reports."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(json.dumps({"order": order, **more}) + "\n")
            self._process.stdin.flush()

    def hear(self, generation: int, report: dict[str, Any] | None) -> None:
        """Handle a report, or the end of reports."""
        if generation != self._generation or self._process is None:
            return
        if report is None:
            self.code = self._process.wait()
            return
        self._heard = time.monotonic()
        try:
            self._take_in(report)
        except (KeyError, TypeError, ValueError):
            sys.stderr.write(f"{self.start.host}: an invalid report: {json.dumps(report)[:200]}\n")

    def _take_in(self, report: dict[str, Any]) -> None:
        said = report["said"]
        if said == "ready":
            self.ready, self._pid, self.store = True, int(report["pid"]), report["store"]
        elif said == "beat":
            self.age = float(report["age"] or 0.0)
        elif said == "reached":
            self.reached, self.why = (int(report["round"]), bool(report["ok"])), str(report["why"])
            self.age = 0.0
        elif said == "failed":
            self.codes = [int(code) for code in report["codes"]]
        elif said == "done":
            self.done = True
        elif said == "out":
            self._on_line(str(report["line"]))
        else:
            sys.stderr.write(f"{self.start.host}: {report.get('line', '')}")

    def lost(self, limit: float) -> str | None:
        """Why this host cannot take part now; None if it can. ``limit``: seconds of silence after which it is lost."""
        if self.code is not None:
            broken = self.code in (SSH_FAILED, -signal.SIGKILL)
            return "ssh failed, or the connection broke" if broken else f"its agent ended with code {self.code}"
        if self.silent(limit):
            return "it is silent"
        if self.age > limit:
            return "it was cut off from the first host"
        return None

    def silent(self, limit: float) -> bool:
        """Whether the agent runs, but has sent nothing for so many seconds."""
        return self.ready and self.code is None and time.monotonic() - self._heard > limit

    def wants_probe(self, number: int, first: Member, again: bool) -> bool:
        """Whether to probe it for a round: not done since its agent or the first started, or without success."""
        done = self._probed == (number, first.starts, self.starts)
        return self.ready and (not done or (again and self.reached == (number, False)))

    def probe(self, number: int, first: Member) -> None:
        """Ask whether it reaches the store of the first host."""
        self._probed = (number, first.starts, self.starts)
        self.reached = (-1, False)
        self.send("probe", round=number, store=first.store)

    def begin(self, **assigned: Any) -> None:
        """Start its workers for a round with this assignment."""
        self.codes, self.done = [], False
        self.send("round", **assigned)

    def hang_up(self) -> None:
        """End the connection and its local process."""
        if self._process is None:
            return
        self._generation += 1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        self._process = None
