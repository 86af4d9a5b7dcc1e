"""Reading of the JSON files of a run folder, which are checked against its manifest first; and checks of all files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from snugfit._core import documents
from snugfit._core.paths import run_cache_folder
from snugfit._core.profile import Profile
from snugfit._core.record import Record
from snugfit._core.request import Request
from snugfit._core.serial import FieldError, from_data
from snugfit._core.workload import Workload
from snugfit._storage.manifest import Manifest, check_files
from snugfit.errors import CheckpointError

MAX_NUMBER = 2**53
"""Largest number in a record; floats hold every integer up to it."""
MAX_SCALE = 2**128
"""Above the largest float32."""
MAX_UNITS = 100_000
MAX_BATCH = 2**31
MAX_CLASSES = 50_000

_LIMITS = {"batch_limit": MAX_BATCH, "index": MAX_UNITS, "of": MAX_UNITS, "batch_size": MAX_BATCH, "val_accuracy": 1}
T = TypeVar("T")


def read_data(kind: type[T], path: Path) -> T:
    """Read a dataclass that was written to a run folder as JSON; raises CheckpointError if it is missing or damaged."""
    if not path.exists():
        raise CheckpointError(f"{path.parent} is not a run folder, or incomplete: it has no {path.name}.")
    check_files(path.parent, path.name)
    return documents.read_data(kind, path, CheckpointError, "Restore it or train again.")


def read_record(folder: Path) -> Record:
    """The record of a finished run.

    Raises:
        CheckpointError: the run is unfinished, or its record is damaged or contains impossible values.
    """
    path = folder / "record.json"
    check_files(folder, path.name)
    if not path.exists() and (folder / "plan.json").exists():
        again = f"snugfit train --resume {quote(str(folder))}"
        raise CheckpointError(f"the run in {folder} is not finished; continue it with {again}.")
    if not path.exists():
        raise CheckpointError(f"{folder} is not a run folder, or incomplete: it has no {path.name}.")
    return documents.read_as(_checked, path, CheckpointError, "Restore it or train again.")


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


@dataclass(frozen=True)
class _Measured:
    """Measurements that are not single numbers."""

    peak_metric: str | None = None
    missed_phases: tuple[str, ...] = ()
    process_peak_bytes: tuple[int, ...] = ()
    device_memory: dict[str, int] | None = None
    loss_scale: dict[str, float] | None = None


@dataclass(frozen=True)
class _Exit:
    index: int
    of: int


_OTHERS = tuple(each.name for each in fields(_Measured))


def _checked(data: Any) -> Record:
    record = from_data(Record, data)
    for name in ("budget", "predicted", "accuracy", "parameters", "overhead_seconds"):
        _check_numbers(name, getattr(record, name), 1 if name == "accuracy" else MAX_NUMBER)
    measured = from_data(_Measured, record.measured, "measured")
    peaks = measured.process_peak_bytes
    _check_numbers("measured.device_memory", measured.device_memory or {}, MAX_NUMBER)
    _check_numbers("measured.loss_scale", measured.loss_scale or {}, MAX_SCALE)
    for number, peak in enumerate(peaks):
        _check_number(f"measured.process_peak_bytes[{number}]", peak, MAX_NUMBER)
    _check_numbers("measured", {key: value for key, value in record.measured.items() if key not in _OTHERS}, MAX_NUMBER)
    for kind in ("phases", "exits", "intervals"):
        for number, entry in enumerate(getattr(record, kind)):
            _check_entry(f"{kind}[{number}]", entry)
    _check_confusion(record.confusion)
    if record.exit is not None:
        _check_entry("exit", from_data(_Exit, record.exit, "exit"))
    if record.kept is not None:
        _check_entry("kept", record.kept)
    if record.profile:
        _check_entry("profile", from_data(Profile, record.profile, "profile"))
    if record.workload:
        _check_entry("workload", from_data(Workload, record.workload, "workload"))
    return record


def _check_numbers(where: str, given: Mapping[str, Any], most: int) -> None:
    for name, value in given.items():
        if value is not None:
            _check_number(f"{where}.{name}", value, most)


def _check_number(where: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise FieldError(where, f"a number from 0 to {most}", value)


def _check_entry(where: str, entry: Any) -> None:
    """Check the numbers among a dataclass's fields."""
    for name, value in vars(entry).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(f"{where}.{name}", value, _LIMITS.get(name, MAX_NUMBER))


def _check_confusion(confusion: list[list[int]]) -> None:
    if len(confusion) > MAX_CLASSES or any(len(row) != len(confusion) for row in confusion):
        raise FieldError("confusion", f"a square of at most {MAX_CLASSES} rows", confusion)
    for row in confusion:
        if row and not 0 <= min(row) <= max(row) <= MAX_NUMBER:
            raise FieldError("confusion", "counts", min(row))
