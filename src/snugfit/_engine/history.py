"""Files kept between runs on this machine: measurements, and predictions with the results of runs."""

from __future__ import annotations

import contextlib
import json
import platform
from functools import partial
from hashlib import sha256
from pathlib import Path

from snugfit._core.documents import DocumentError, converted, parse_json, read_text
from snugfit._core.hardware import Hardware
from snugfit._core.option_groups import MachineOptions
from snugfit._core.paths import profiles_folder, try_write_text
from snugfit._core.plan import Plan
from snugfit._core.record import Record
from snugfit._core.registry import code_digest
from snugfit._core.serial import from_data, to_data
from snugfit._planner import PastRun, past_run
from snugfit._version import __version__
from snugfit.errors import CheckpointError
from snugfit.profiling import Measurements

MOST_RUNS = 500
"""Most runs to read, the latest."""
MOST_BYTES = 2**20
"""Size up to which the file of runs grows, some 3,000 of them; one of 64 MiB would not be read at all."""


def measurements(options: MachineOptions, hardware: Hardware) -> Measurements:
    """Measurements made on this hardware with these versions of Python, torch and snugfit."""
    where = options.profile_cache
    return Measurements(profiles_folder(where), machine_text(hardware), renew=where == "renew")


def past_runs(options: MachineOptions, hardware: Hardware) -> list[PastRun]:
    """Runs on this hardware with these versions, oldest first; unreadable lines are left out."""
    folder = profiles_folder(options.profile_cache)
    found: list[PastRun] = []
    if folder is None:
        return found
    try:
        lines = read_text(_runs_file(folder, hardware)).splitlines()
    except CheckpointError:
        return found
    for line in lines[-MOST_RUNS:]:
        with contextlib.suppress(DocumentError):
            found.append(converted(partial(from_data, PastRun), parse_json(line)))
    return found


def keep_run(options: MachineOptions, record: Record, plan: Plan) -> None:
    """Add a finished run to those that correct later predictions; without write access it is not kept."""
    folder = profiles_folder(options.profile_cache)
    if folder is None or plan.choice is None:
        return
    run = past_run(record, plan.workload, plan.choice.correction)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _append(_runs_file(folder, plan.hardware), json.dumps(to_data(run)))


def _append(path: Path, line: str) -> None:
    """Add a line to a file; one that has become large is replaced by its latest lines."""
    with path.open("a+b") as file:
        file.write(line.encode() + b"\n")
        if (size := file.tell()) <= MOST_BYTES:
            return
        file.seek(size - MOST_BYTES)
        lines = file.read().decode(errors="replace").splitlines()[-MOST_RUNS:]
    try_write_text(path, "\n".join(lines) + "\n")


def _runs_file(folder: Path, hardware: Hardware) -> Path:
    return folder / f"runs-{sha256(machine_text(hardware).encode()).hexdigest()[:16]}.jsonl"


def machine_text(hardware: Hardware) -> str:
    """Identity of hardware and software, on which measurements depend."""
    return json.dumps([to_data(hardware), platform.python_version(), __version__, code_digest()], sort_keys=True)
