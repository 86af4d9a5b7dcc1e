"""``data.yaml``: folders of the parts of a data set in YOLO's format, and names of its classes."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snugfit._core.yaml_text import read_yaml
from snugfit._data.sets import MOST_CLASSES
from snugfit.errors import DataError

SPLITS = ("train", "val", "test")


def read_settings(file: Path) -> dict[str, Any]:
    """Read ``path``, ``train``, ``val`` and ``test`` (lists of texts), ``names`` (a list) and ``nc``, if present.

    Raises:
        DataError: the file is not YAML, too large or too deep, or one of these is of another type or out of range.
    """
    found = read_yaml(file, DataError)
    if not isinstance(found, dict):
        raise DataError(f"{file} is not a data.yaml: it does not say train: and names:.")
    settings = {key: value for key, value in found.items() if key in _KEYS and value is not None}
    try:
        return {key: _KEYS[key](value) for key, value in settings.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: {error}. Correct it.") from error


def _texts(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{reprlib.repr(text)} is not a folder or list of images")
    return texts


def _text(value: Any) -> str:
    (text,) = _texts([value])
    return text


def _names(value: Any) -> list[str]:
    names = value
    if isinstance(value, dict):
        if not all(type(label) is int for label in value) or sorted(value) != list(range(len(value))):
            raise ValueError(f"names must be numbered from 0 to {len(value) - 1}")
        names = [value[label] for label in range(len(value))]
    if not isinstance(names, list) or not all(isinstance(name, (str, int, float)) for name in names):
        raise TypeError(f"names are {reprlib.repr(value)}, not a list of names or names by number")
    return [str(name) for name in names]


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_CLASSES:
        raise ValueError(f"nc, the number of classes, is {reprlib.repr(value)}, not from 1 to {MOST_CLASSES:,}")
    return value


_KEYS: dict[str, Callable[[Any], Any]] = {"path": _text, **dict.fromkeys(SPLITS, _texts), "names": _names, "nc": _count}
