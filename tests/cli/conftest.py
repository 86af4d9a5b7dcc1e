"""A command line whose child process is the real worker over a fake API."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from snugfit._cli import app, worker_processes
from snugfit._core import known

FAKES = Path(__file__).parent / "fakes"
LAUNCH = (
    "import snugfit._cli.worker_processes as job, snugfit._core.known as known; job.WORKER_MODULE = 'fake_worker'; "
    "known.check_names = lambda request: None; from snugfit._cli import main; main()"
)


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object; NaN and trailing text are errors."""

        def refuse(constant):
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=os.pathsep)
    monkeypatch.setattr(worker_processes, "WORKER_MODULE", "fake_worker")
    monkeypatch.setattr(known, "check_names", lambda request: None)  # the fakes' models are named by what they do


@pytest.fixture
def snugfit(fakes, capfd, monkeypatch, tmp_path):
    """Run one command line in this process, its work in a child; the current folder is a fresh one."""
    monkeypatch.chdir(tmp_path)

    def call(*tokens: str) -> Outcome:
        capfd.readouterr()
        code = app.run(tokens)
        sys.stdout.flush()
        return Outcome(code, *capfd.readouterr())

    return call


@pytest.fixture
def start(fakes, tmp_path):
    """Start the command line as a process of its own, over the fake worker."""

    def launch(*tokens: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LAUNCH, *tokens]
        return subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )

    return launch


@pytest.fixture
def shell(fakes, tmp_path):
    """Run a line of bash in which ``snugfit`` is the command line over the fake worker."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        command = f"{shlex.quote(sys.executable)} -c {shlex.quote(LAUNCH)}"
        script = f'set -o pipefail; snugfit() {{ {command} "$@"; }}; {line}'
        return subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )

    return run
