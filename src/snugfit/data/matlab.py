"""MATLAB files that list images: the vectors of numbers and of texts that are asked for, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from snugfit.errors import DataError

_NUMBERS = frozenset({"double", "single"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)})
_TEXTS = frozenset({"cell"})
_LONGEST = 10**6


def read_vectors(path: Path, *, numbers: Iterable[str] = (), texts: Iterable[str] = ()) -> dict[str, list[str]]:
    """Read variables of a ``.mat`` file (version 4 to 7); every entry as text, as lists in text files have it.

    What the file says of a variable is checked before its content is read: objects, structures and functions never are.

    Args:
        path: the file.
        numbers: variables that are vectors of real numbers.
        texts: variables that are vectors of cells with one text each.

    Raises:
        DataError: the file or scipy is missing, or the file is damaged, or a variable is missing, has another type, is
            no vector, or has more than a million entries.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing. Get it anew.")
    try:
        from scipy.io import loadmat, whosmat
    except ImportError as error:
        raise DataError(f"scipy, which reads {path.name}, is missing; install it with: pip install scipy") from error
    wanted = {**dict.fromkeys(numbers, _NUMBERS), **dict.fromkeys(texts, _TEXTS)}
    try:
        _check(whosmat(path, appendmat=False), wanted)
        content = loadmat(path, variable_names=list(wanted), appendmat=False)
        return {
            name: [_text(cell) if kinds is _TEXTS else _number(cell) for cell in content[name].ravel()]
            for name, kinds in wanted.items()
        }
    except Exception as error:  # whatever a damaged file makes of scipy's parser
        raise DataError(f"{path} is damaged or no list of images ({error}). Get it anew.") from error


def _check(found: list[tuple[str, tuple[int, ...], str]], wanted: dict[str, frozenset[str]]) -> None:
    """Refuse what is no vector of the type that is wanted; ``found`` has names, shapes and types."""
    for name, kinds in wanted.items():
        same = [(shape, kind) for other, shape, kind in found if other == name]
        if len(same) != 1:
            raise ValueError(f"it has {len(same)} variables '{name}'")
        ((shape, kind),) = same
        if kind not in kinds:
            raise ValueError(f"'{name}' is of type {kind}")
        if len(shape) != 2 or min(shape) != 1 or max(shape) > _LONGEST:
            raise ValueError(f"'{name}' is no list but of shape {shape}")


def _number(value: Any) -> str:
    if not np.isrealobj(value):
        raise ValueError(f"{value} is no real number")
    return f"{value:g}"


def _text(cell: Any) -> str:
    text = cell.item()
    if not isinstance(text, str):
        raise ValueError(f"{text!r:.60} is no name")
    return text
