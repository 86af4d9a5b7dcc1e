"""Reading records of unknown origin; impossible values are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from snugfit._core.documents import read_as
from snugfit._core.profile import Profile
from snugfit._core.record import Record
from snugfit._core.serial import FieldError, from_data
from snugfit._core.workload import Workload
from snugfit.errors import CheckpointError

MAX_NUMBER = 2**53
"""Largest number in a record; floats hold every integer up to it."""
MAX_SCALE = 2**128
"""Above the largest float32."""
MAX_UNITS = 100_000
MAX_BATCH = 2**31
MAX_CLASSES = 50_000

_LIMITS = {"batch_limit": MAX_BATCH, "index": MAX_UNITS, "of": MAX_UNITS, "batch_size": MAX_BATCH, "val_accuracy": 1}


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


def read_record(path: Path) -> Record:
    """Read ``record.json``; raises CheckpointError if it is damaged or contains impossible values."""
    return read_as(_checked, path, CheckpointError, "Restore it or train again.")


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
