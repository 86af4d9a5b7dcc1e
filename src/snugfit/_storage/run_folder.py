"""Reading of the JSON files of a run folder, which are checked against its manifest first."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from snugfit._core import documents, record_checks
from snugfit._core.record import Record
from snugfit._storage.manifest import check_files
from snugfit.errors import CheckpointError

T = TypeVar("T")


def read_data(kind: type[T], path: Path) -> T:
    """Read a dataclass that was written to a run folder as JSON.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if not path.exists():
        raise CheckpointError(f"{path.parent} is not a run folder, or incomplete: it has no {path.name}.")
    check_files(path.parent, path.name)
    return documents.read_data(kind, path, CheckpointError, "Restore it or train again.")


def read_record(folder: Path) -> Record:
    """The record of a finished run.

    Raises:
        CheckpointError: the run is unfinished, or its record is damaged.
    """
    path = folder / "record.json"
    check_files(folder, path.name)
    if not path.exists() and (folder / "plan.json").exists():
        raise CheckpointError(f"the run in {folder} is not finished; continue it with snugfit train --resume {folder}.")
    if not path.exists():
        raise CheckpointError(f"{folder} is not a run folder, or incomplete: it has no {path.name}.")
    return record_checks.read_record(path)
