"""Reading records of unknown origin; impossible values are rejected."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snugfit._core.documents import read_as
from snugfit._core.profile import ProbeLine
from snugfit._core.record import Record
from snugfit._core.serial import FieldError, from_data
from snugfit.errors import CheckpointError

MAX_NUMBER = 2**53
"""Largest number in a record; floats hold every integer up to it."""
MAX_UNITS = 100_000
MAX_BATCH = 2**31
MAX_CLASSES = 50_000

_LIMITS = {"batch_limit": MAX_BATCH, "index": MAX_UNITS, "batch_size": MAX_BATCH, "val_accuracy": 1}


@dataclass(frozen=True)
class _Tensor:
    name: str
    parameters: int


@dataclass(frozen=True)
class _Operator:
    tensors: tuple[_Tensor, ...]


@dataclass(frozen=True)
class _Operators:
    operators: tuple[_Operator, ...] = ()


@dataclass(frozen=True)
class _Profile:
    """The part of a profile that reports use."""

    lines: dict[str, ProbeLine] = field(default_factory=dict)
    base_bytes: int = 0
    tensors: _Operators | None = None


@dataclass(frozen=True)
class _Measured:
    """Measurements that are not numbers."""

    peak_metric: str | None = None
    missed_phases: tuple[str, ...] = ()


_TEXTS = tuple(each.name for each in dataclasses.fields(_Measured))


@dataclass(frozen=True)
class _Workload:
    """The part of a workload that reports use."""

    train_count: int | None = None
    batch_limit: int | None = None


def read_record(path: Path) -> Record:
    """Read ``record.json``.

    Raises:
        CheckpointError: the file is damaged, or contains impossible values.
    """
    return read_as(_checked, path, CheckpointError, "Restore it or train again.")


def _checked(data: Any) -> Record:
    record = from_data(Record, data)
    for name in ("budget", "predicted", "accuracy", "parameters", "overhead_seconds"):
        _check_numbers(name, getattr(record, name), 1 if name == "accuracy" else MAX_NUMBER)
    from_data(_Measured, record.measured, "measured")
    _check_numbers("measured", {key: value for key, value in record.measured.items() if key not in _TEXTS}, MAX_NUMBER)
    for kind in ("phases", "exits", "intervals"):
        for number, entry in enumerate(getattr(record, kind)):
            _check_entry(f"{kind}[{number}]", entry)
    _check_exit(record)
    _check_confusion(record)
    _check_entry("profile", from_data(_Profile, record.profile, "profile"))
    _check_entry("workload", from_data(_Workload, record.workload, "workload"))
    return record


def _check_numbers(where: str, given: Mapping[str, Any], most: int) -> None:
    for name, value in given.items():
        if value is not None:
            _check_number(f"{where}.{name}", value, most)


def _check_number(where: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise FieldError(where, f"a number from 0 to {most}", value)


def _check_entry(where: str, entry: Any) -> None:
    for name, value in _numbers(entry):
        _check_number(f"{where}.{name}", value, _LIMITS.get(name, MAX_NUMBER))


def _numbers(entry: Any) -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(entry):
        value = getattr(entry, each.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield each.name, value


def _check_exit(record: Record) -> None:
    taken = record.exit
    if taken is None:
        return
    for name in ("index", "of"):
        if type(taken.get(name)) is not int or not 0 <= taken[name] <= MAX_UNITS:
            raise FieldError(f"exit.{name}", f"an integer from 0 to {MAX_UNITS}", taken.get(name))


def _check_confusion(record: Record) -> None:
    size = len(record.confusion)
    if size > MAX_CLASSES or any(len(row) != size for row in record.confusion):
        raise FieldError("confusion", f"a square of at most {MAX_CLASSES} rows", record.confusion)
    for row in record.confusion:
        if row and not 0 <= min(row) <= max(row) <= MAX_NUMBER:
            raise FieldError("confusion", "counts", min(row))
