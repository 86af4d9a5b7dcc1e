"""A command that is killed takes the process that trains with it, however early."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from snugfit._cli import child_process
from snugfit._cli.worker import main

START = """
import json, os, subprocess, sys
reading, writing = os.pipe()
worker = subprocess.Popen(
    [sys.executable, "-m", "snugfit._cli.worker", str(writing), str(os.getpid())],
    stdin=subprocess.PIPE, pass_fds=(writing,), start_new_session=True,
)
worker.stdin.write(json.dumps({"command": "train", "threads": 1, "quiet": True, "debug": True}).encode())
worker.stdin.close()
print(worker.pid, flush=True)
os._exit(9)
"""


def test_a_worker_whose_parent_died_while_it_started_does_nothing() -> None:
    """It inherits the parent's streams: they end when it does."""
    parent = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=120, check=False)
    assert parent.returncode == 9
    assert int(parent.stdout) > 0 and parent.stderr == ""


def test_a_worker_is_told_its_parent(monkeypatch) -> None:
    seen: list[list[str]] = []

    class Started:
        def __init__(self, command: list[str], **more: object) -> None:
            seen.append(command)
            raise OSError("enough")

    monkeypatch.setattr(child_process.subprocess, "Popen", Started)
    with contextlib.suppress(OSError):
        child_process.run_job({})
    assert seen[0][-1] == str(os.getpid())


def test_another_parent_ends_it_before_it_reads_a_job(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["worker", "0", "-1"])
    monkeypatch.setattr("snugfit._cli.worker.die_with_parent", lambda: None)
    assert main() == 130
