"""The run folder of a launch, in which each round continues what the round before began."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from snugfit._core.request import Request
from snugfit._engine.running import FIRST_FILES, with_absolute_paths
from snugfit._storage.lock import LOCK_FILE
from snugfit._storage.manifest import MANIFEST_FILE
from snugfit._storage.run_folder import read_data, read_record
from snugfit._training.launch import World
from snugfit.errors import CheckpointError


def for_launch(request: Request, here: World) -> Request:
    """The request with a run folder that a restart of the same launch finds."""
    machine = request.machine
    return replace(request, machine=replace(machine, out=machine.out or f"runs/{here.run_id or 'launch'}"))


def begun(request: Request, here: World) -> str | None:
    """The run folder that this round continues; None if it begins a new run.

    The folder decides, not a count of restarts: an interrupted run is resumed if the request is the same. Files of a
    process that was lost before the run could be resumed are removed by the next round.

    Args:
        request: with its run folder.
        here: this process.
    """
    folder = Path(str(request.machine.out))
    if (folder / "record.json").exists():
        return None
    if (folder / FIRST_FILES[-1]).exists():
        return str(folder) if _same(request, folder) else None
    found = [each for each in folder.iterdir() if each.name != LOCK_FILE] if folder.is_dir() else []
    if here.restarts and all(_is_draft(each) for each in found):
        for each in found:
            each.unlink()
    return None


def finished(request: Request, here: World) -> dict[str, Any] | None:
    """The record of a run that an earlier round ended, whose process was lost while it exited."""
    folder = Path(str(request.machine.out))
    ended = here.restarts and (folder / "record.json").exists() and _same(request, folder)
    return read_record(folder).to_json() if ended else None


def _is_draft(path: Path) -> bool:
    return path.is_file() and path.name.removesuffix(".tmp") in (*FIRST_FILES, MANIFEST_FILE)


def _same(request: Request, folder: Path) -> bool:
    """Whether a run folder has the same request."""
    try:
        before = read_data(Request, folder / "request.json")
    except CheckpointError:
        return False
    now = with_absolute_paths(request)
    machine = replace(now.machine, cache_dir=before.machine.cache_dir)
    return before.machine.cache_dir == now.machine.cache_dir and replace(before, machine=machine) == now
