"""Data sets that a function of the user's own gives: ``--data package.module:function``."""

from __future__ import annotations

from typing import Any

from snugfit._core.amounts import height_and_width
from snugfit._core.functions import call_function
from snugfit._core.options import from_keywords
from snugfit._data.sets import Splits
from snugfit._data.split import SplitOptions, limited
from snugfit._data.user import from_dataset
from snugfit.errors import DataError, UsageError


def load_function(name: str, **options: Any) -> Splits:
    """Call a function that returns a map-style data set, two or three of them, or what ``from_dataset`` returns.

    Args:
        name: ``package.module:function``; it is called without arguments.
        **options: fields of :class:`snugfit._data.split.SplitOptions`.

    Raises:
        UsageError: it returns images of another size than ``image_size`` from ``from_dataset``.
        DataError: it cannot be imported, fails, or returns something else.
    """
    chosen, given = from_keywords(SplitOptions, options), call_function(name, DataError)
    if not isinstance(given, Splits):
        return from_dataset(*datasets_of(given, name), name=name, **options)
    sides, shape = chosen.sides, given.image_shape[1:]
    if sides is not None and height_and_width(sides) != shape:
        raise UsageError(
            f"{name} prepares images of {shape[0]}x{shape[1]} pixels by snugfit.from_dataset; leave out "
            "--image-size, or give image_size= there."
        )
    count = len(given.class_names)
    if chosen.classes not in (None, count):
        raise DataError(f"'{name}' has {count} classes, not {chosen.classes}. Ask for {count}.")
    return limited(given, chosen)


def datasets_of(given: Any, name: str) -> tuple[Any, ...]:
    """One to three data sets; raises DataError for another number, or for nothing."""
    parts = given if isinstance(given, tuple) else (given,)
    if not 1 <= len(parts) <= 3 or parts[0] is None:
        raise DataError(
            f"{name} returned {'nothing' if given is None else f'{len(parts)} values'}; return a data set, or a "
            "tuple of two or three: training, validation, test."
        )
    return parts
