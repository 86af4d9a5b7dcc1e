"""Checks of the arrays that functions of this package are given; each raises UsageError."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from snugfit.errors import UsageError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]


def importances(values: Any) -> Floats:
    """Importance of every tensor (N,); any finite number."""
    return _finite("importance", values)


def seconds(name: str, values: Any, count: int | None = None) -> Floats:
    """Times (N,) in seconds, finite and at least 0; ``count`` of them if given."""
    return _not_negative(name, _finite(name, values, count))


def byte_counts(name: str, values: Any, count: int | None = None) -> Integers:
    """Whole bytes (N,), at least 0; ``count`` of them if given."""
    return _not_negative(name, whole(name, values, count))


def whole(name: str, values: Any, count: int | None = None) -> Integers:
    """Whole numbers (N,); ``count`` of them if given."""
    floats = _finite(name, values, count)
    if np.any(floats != np.floor(floats)):
        raise UsageError(f"{name} holds fractions of a byte or of an index; give whole numbers.")
    return _vector(name, values, np.int64, count)


def mask(values: Any, count: int) -> Mask:
    """Which tensors are selected (N,), ``count`` of them."""
    return _vector("mask", values, np.bool_, count)


def budget(name: str, value: float) -> float:
    """A limit, at least 0; infinite means none."""
    if math.isnan(value) or value < 0:
        raise UsageError(f"{name} is {value}; a budget is a number that is at least 0.")
    return value


def steps(resolution: int) -> int:
    """Number of steps of a time budget, at least 1."""
    if resolution != int(resolution) or resolution < 1:
        raise UsageError(f"resolution is {resolution}; it is a whole number of steps, at least 1.")
    return int(resolution)


def _vector(name: str, values: Any, dtype: Any, count: int | None = None) -> NDArray[Any]:
    try:
        array = np.asarray(values).astype(dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} cannot be read as numbers: {error}.") from error
    if array.ndim != 1:
        raise UsageError(f"{name} has shape {array.shape}; it needs one number for each tensor.")
    if count is not None and len(array) != count:
        raise UsageError(f"{name} has length {len(array)}, but there are {count} tensors.")
    return array


def _finite(name: str, values: Any, count: int | None = None) -> Floats:
    array = _vector(name, values, np.float64, count)
    if not np.all(np.isfinite(array)):
        raise UsageError(f"{name} holds NaN or an infinite number at index {int(np.argmin(np.isfinite(array)))}.")
    return array


def _not_negative(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if np.any(array < 0):
        raise UsageError(f"{name} is negative at index {int(np.argmax(array < 0))}; it is at least 0.")
    return array
