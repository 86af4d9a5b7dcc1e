"""Reading of the JSON files of a run folder, which are checked against its manifest first; and checks of all files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from snugfit._core import documents, record_checks
from snugfit._core.paths import run_cache_folder
from snugfit._core.record import Record
from snugfit._core.request import Request
from snugfit._storage.manifest import Manifest, check_files
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


@dataclass(frozen=True)
class Verification:
    """Result of a check of a run folder; names are paths in it.

    >>> Verification("runs/a", files=30, damaged={}, missing=("record.json",), extra=("notes.txt",)).sound
    False

    Attributes:
        run_dir: the folder.
        files: how many files its manifest lists.
        damaged: what is wrong with each changed file, by name.
        missing: files that do not exist.
        extra: files that the run has not written, or not finished; nothing reads them.
    """

    run_dir: str
    files: int
    damaged: dict[str, str]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether every file is there and as it was written."""
        return not self.damaged and not self.missing


def verify(run: str | Path) -> Verification:
    """Compare every file of a run folder, finished or not, with its digest at the time of writing.

    >>> import snugfit
    >>> found = snugfit.verify("runs/first")
    >>> found.sound, found.files > 10, found.damaged
    (True, True, {})

    The run's caches below ``--cache-dir`` are checked as well.

    Raises:
        CheckpointError: the folder has no manifest, or that is damaged.
    """
    folder = Path(run)
    manifest = Manifest.read(folder, _caches(folder))
    flaws = {manifest.name(flaw.path): flaw for flaw in manifest.flaws()}
    return Verification(
        run_dir=str(run),
        files=len(manifest.names),
        damaged={name: flaw.reason for name, flaw in flaws.items() if not flaw.missing},
        missing=tuple(name for name, flaw in flaws.items() if flaw.missing),
        extra=tuple(manifest.name(path) for path in manifest.unlisted()),
    )


def _caches(folder: Path) -> Path | None:
    """The folder of the run's caches; None if its request cannot be read."""
    try:
        return run_cache_folder(documents.read_data(Request, folder / "request.json").machine.cache_dir, folder)
    except CheckpointError:
        return None
