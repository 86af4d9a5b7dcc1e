"""The lists in a JSON file, entry by entry: a file of hundreds of MB is never in memory as a whole.

The standard library decodes only whole texts, so this module finds the entries and decodes one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from snugfit._data.files import check_regular
from snugfit.errors import DataError

_CHUNK = 1 << 18
_LONGEST = 1 << 22
_SPACE = " \t\n\r"
_AFTER_A_VALUE = ",:]}" + _SPACE
_DECODER = json.JSONDecoder()


def entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Read a JSON object, and give each entry of its lists with the list's name, in the order of the file.

    Members that are not lists are skipped. About a MB is in memory at a time, or one entry if it is larger.
    """
    check_regular(path)
    try:
        with path.open(encoding="utf-8") as file:
            yield from _Scanner(file).lists()
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}. Restore it.") from error


class _Scanner:
    """A window that moves forward over a text."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._window, self._at = "", 0
        self._passed = 0  # characters before the window

    def lists(self) -> Iterator[tuple[str, Any]]:
        """Names and entries of the lists in the object that the text is."""
        separator = self._take("{")
        if self._next() == "}":
            separator = self._take("}")
        while separator != "}":
            name = self._value()
            self._take(":")
            if self._next() == "[":
                for entry in self._list():
                    yield name, entry
            else:
                self._value()
            separator = self._take(",}")
        if self._next():
            raise ValueError(f"more follows the object that ends at {self._place()}")

    def _list(self) -> Iterator[Any]:
        separator = self._take("[")
        if self._next() == "]":
            separator = self._take("]")
        while separator != "]":
            yield self._value()
            separator = self._take(",]")

    def _value(self) -> Any:
        """Decode the next value; the character after it shows that it is complete."""
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._window, self._at)
            except json.JSONDecodeError:
                value, end = None, len(self._window)
            if end < len(self._window) and self._window[end] in _AFTER_A_VALUE:
                self._at = end
                return value
            if not self._read_on():
                raise ValueError(f"a value is wrong or breaks off at {self._place()}")

    def _take(self, expected: str) -> str:
        """Consume the next character, which must be an expected one."""
        found = self._next()
        if not found or found not in expected:
            wanted = " or ".join(f"'{character}'" for character in expected)
            raise ValueError(f"expected {wanted} at {self._place()}" + ("" if found else ", the end of the file"))
        self._at += 1
        return found

    def _next(self) -> str:
        """The next character other than white space; empty at the end of the text."""
        while True:
            while self._at < len(self._window) and self._window[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._window) or not self._read_on():
                return self._window[self._at : self._at + 1]

    def _read_on(self) -> bool:
        """Drop the text before the position and double the rest; False at the end of the text."""
        ahead = len(self._window) - self._at
        if ahead > _LONGEST:
            raise ValueError(f"the entry at {self._place()} is wrong, or longer than {_LONGEST:,} characters")
        more = self._file.read(max(_CHUNK, ahead))
        self._passed += self._at
        self._window, self._at = self._window[self._at :] + more, 0
        return bool(more)

    def _place(self) -> str:
        return f"character {self._passed + self._at + 1:,}"
