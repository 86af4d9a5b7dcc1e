"""Tables of runs, made in one fresh process: another would import everything and measure shared plans again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

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


def table(rows: Iterable[str], slow: Iterable[str]) -> list[Any]:
    """Rows as parameters; those of ``slow`` are marked so. Their mechanisms have a quick row, here or as said there."""
    slow = set(slow)
    assert slow <= set(rows)
    return [pytest.param(row, marks=pytest.mark.slow) if row in slow else row for row in rows]


def selected(request: pytest.FixtureRequest, rows: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a file's table that its selected tests ask for."""
    items = (item for item in request.session.items if item.path == request.path)
    asked = {value for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")
             for value in item.callspec.params.values()}  # fmt: skip
    return {name: row for name, row in rows.items() if name in asked}


def run_rows(script: str, rows: Mapping[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """Run rows in a fresh process; what it found, by the names of the rows.

    A script is given its rows as JSON, and a folder of its own in which it leaves ``found.json``.
    """
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(rows), str(folder)], cwd=Path(__file__).parent, timeout=timeout,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads((folder / "found.json").read_text()))
