"""The command line as its users run it: in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def snug(*arguments: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run snugfit; it ends with this code and without a traceback."""
    command = [sys.executable, "-m", "snugfit", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return done
