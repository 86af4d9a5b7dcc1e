"""The command line as its users run it: in a process of its own, where the networks of the conformance tests are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

NETWORKS = Path(__file__).parents[1] / "conformance"


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start snugfit, by default with its output in pipes."""
    path = os.pathsep.join(filter(None, [str(NETWORKS), os.environ.get("PYTHONPATH")]))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": path}}
    return subprocess.Popen([sys.executable, "-m", "snugfit", *arguments], text=True, **{**pipes, **options})


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run snugfit; it ends without a traceback."""
    with start(*arguments, **options) as process:
        try:
            out, err = process.communicate(timeout=280)
        finally:
            process.kill()
    assert "Traceback" not in err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def snug(*arguments: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run snugfit in a folder; it ends with this code and without a traceback."""
    done = run(*arguments, cwd=cwd)
    assert done.returncode == code, done.stderr[-2000:]
    return done


def refusal(*arguments: str, cwd: Path, code: int) -> str:
    """The error with which snugfit ends, with this code."""
    return snug(*arguments, cwd=cwd, code=code).stderr.rpartition("error: ")[2]
