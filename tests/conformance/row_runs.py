"""Tables of runs, worked off by two processes at once: tests run with one thread each, and leave a core idle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREPARED = """
import json, sys
import pytest
sys.path.insert(0, "..")
from conftest import use_steady_times
import snugfit
snugfit.prepare_process(1)
use_steady_times(pytest.MonkeyPatch())
rows, folder = json.loads(sys.argv[1]), sys.argv[2]
seen = {}
"""
"""The beginning of a script that runs strategies."""


def run_in_two(script: str, rows: Mapping[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """Give every other row to the second of two fresh processes; what both found, by the names of the rows.

    A script is given its rows as JSON, and a folder of its own in which it leaves ``found.json``.
    """
    names = list(rows)
    processes = []
    for part in (0, 1):
        own = folder / str(part)
        own.mkdir()
        some = json.dumps({name: rows[name] for name in names[part::2]})
        with (own / "stderr").open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", script, some, str(own)], cwd=Path(__file__).parent,
                stdout=subprocess.DEVNULL, stderr=stderr, env={**os.environ, "XDG_CACHE_HOME": str(own)},
            )  # fmt: skip
        processes.append((process, own))
    found: dict[str, Any] = {}
    try:
        for process, own in processes:
            assert process.wait(timeout) == 0, (own / "stderr").read_text()[-2000:]
            found |= json.loads((own / "found.json").read_text())
    finally:
        for process, _ in processes:
            process.kill()
    return {name: found[name] for name in names}
