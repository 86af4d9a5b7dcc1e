"""Reading of JSON and other text files of unknown origin, with checks and limits.

Functions that take a path raise the error class that the caller gives; those that take a text or data raise
:class:`DocumentError`. :mod:`snugfit._core.yaml_text` does the same for YAML.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from snugfit._core.serial import from_data
from snugfit._quantities import format_bytes
from snugfit.errors import CheckpointError, SnugfitError

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
"""Largest text that is read."""
_PIECE_BYTES = 2**16
MAX_DEPTH = 64
"""Most levels of nested lists and objects."""
MAX_INTEGER = 2**64
"""Absolute values of integers are smaller."""


class DocumentError(ValueError):
    """A text that is not JSON or YAML, or exceeds a limit; the message gives the reason."""


def read_text(
    path: str | Path, error: type[SnugfitError] = CheckpointError, advice: str = "", most: int = MAX_BYTES
) -> str:
    """Read a UTF-8 text of at most ``most`` bytes, with or without a byte order mark, from a regular file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            content = bytearray()  # its reported size is no limit: the file may grow, and system files report 0
            while len(content) <= most and (part := file.read(_PIECE_BYTES)):  # each read allocates this much
                content += part
        if len(content) > most:
            raise ValueError(f"it is larger than {format_bytes(most)}, the most that such a file may have")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise error(f"{path} is not UTF-8 text (byte {wrong.start}). {advice}".rstrip()) from wrong
    except (OSError, ValueError) as wrong:
        why = getattr(wrong, "strerror", None) or wrong
        raise error(f"cannot read {path}: {why}. {advice}".rstrip()) from wrong


def read_data(
    kind: type[T], path: str | Path, error: type[SnugfitError] = CheckpointError, advice: str = "Restore it."
) -> T:
    """Read a dataclass that :func:`snugfit._core.serial.to_data` wrote; unknown fields are ignored."""
    return read_as(lambda data: from_data(kind, data), path, error, advice)


def read_as(
    make: Callable[[Any], T], path: str | Path, error: type[SnugfitError] = CheckpointError, advice: str = "Restore it."
) -> T:
    """Read a JSON file and convert it with a function."""
    text = read_text(path, error, advice)
    try:
        return converted(make, parse_json(text))
    except DocumentError as wrong:
        raise error(f"{path} is damaged or not what it should be: {wrong}. {advice}".rstrip()) from wrong


def parse_json(text: str | bytes) -> Any:
    """Parse JSON: numbers finite and below 2^64, lists and objects not too deep, no key twice in an object."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise DocumentError(f"it is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise DocumentError(str(error)) from error
    check_plain(value)
    return value


def converted(make: Callable[[Any], T], data: Any) -> T:
    """Convert data of unknown origin with a function, whose errors become a :class:`DocumentError`."""
    try:
        return make(data)
    except KeyError as error:
        raise DocumentError(f"{error} is missing") from error
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, SnugfitError) as error:
        raise DocumentError(str(error).rstrip(".")) from error


def check_plain(value: Any) -> None:
    """Check that data is plain (as JSON has it), not too deep, and its numbers in bounds; raises DocumentError."""
    level, depth = [value], 0
    while level:
        inside: list[Any] = []
        for item in level:
            if not isinstance(item, (dict, list)):
                _check_scalar(item)
            elif depth == MAX_DEPTH:
                raise DocumentError(f"it is nested more than {MAX_DEPTH} deep")
            else:
                inside.extend(item.values() if isinstance(item, dict) else item)
                for key in item if isinstance(item, dict) else ():
                    _check_scalar(key)
        level, depth = inside, depth + 1


def _check_scalar(item: Any) -> None:
    if isinstance(item, float) and not math.isfinite(item):
        raise DocumentError(f"it holds {item}, which is no finite number")
    if isinstance(item, int) and not -MAX_INTEGER < item < MAX_INTEGER:
        raise DocumentError("it holds an integer of more than 64 bits")
    if item is not None and not isinstance(item, (str, int, float)):
        raise DocumentError(f"it holds a {type(item).__name__}, and takes texts, numbers, true, false and null")
    if isinstance(item, str) and not item.isascii():
        try:
            item.encode("utf-8", "surrogateescape")  # by which JSON has file names that are not UTF-8
        except UnicodeEncodeError:
            raise DocumentError(
                "it holds a text with half a character, which can be neither shown nor written"
            ) from None


def open_regular(path: str | Path) -> int:
    """Open a file for reading; ValueError if it is not regular, since opening a pipe may wait forever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return descriptor


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise DocumentError(f"{twice!r:.80} occurs twice in an object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise DocumentError(f"it holds {name}, which is no finite number")
