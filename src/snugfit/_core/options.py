"""Options by declaration: what an annotation says of a value is checked here, for Python, YAML and the command line.

An option's annotation is all there is to write: ``lr: Annotated[float | None, Range(above=0)] = None``. A value that
does not fit gives the same sentence wherever it came from, since text is read into a plain value first (:func:`read`)
and then checked as one from Python is (:func:`checked`).
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from snugfit._core.amounts import parse_bytes, parse_seconds
from snugfit.errors import UnknownNameError, UsageError, shown

T = TypeVar("T")
LEAST_BYTES = 10**6
"""Smallest size that may be given as a number of bytes: smaller numbers were meant as MB."""


@dataclass(frozen=True)
class Range:
    """Numbers that an option may be.

    Attributes:
        least, most: ends that it may be.
        above, below: ends that it may not be.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f" from {_number(self.least)} to {_number(self.most)}"
        ends = {"of at least": self.least, "above": self.above, "of at most": self.most, "below": self.below}
        told = [f" {words} {_number(end)}" for words, end in ends.items() if math.isfinite(end)]
        return " and".join(told).replace(" and of ", " and ")


@dataclass(frozen=True)
class Names:
    """Texts that are names of something, where they are not written out in a ``Literal``."""

    known: tuple[str, ...]


@dataclass(frozen=True)
class Text:
    """Texts with a form of their own.

    Attributes:
        says: what they are; completes "must be".
        read: reads one, raising a ValueError, or returning None or False where it is none.
    """

    says: str
    read: Callable[[str], object]


class _Size:
    """Sizes: text with a unit, or from Python a whole number of bytes."""


@dataclass(frozen=True)
class DataSetName:
    """Texts that name a data set, or a folder of images: checked early, made absolute, and opened for the strategy."""


Count = Annotated[int, Range(1, 10**9)]
Share = Annotated[float, Range(0, 1)]
Workers = Annotated[int, Range(1, 1024)]
"""Threads, processes or devices."""
Size = Annotated[str, _Size()]
Positive = Annotated[float, Range(above=0)]
Choice = Literal["auto", "on", "off"]
Seconds = Annotated[str, Text("a duration like 90s, 15m or 1h30m", parse_seconds)]


def checked(name: str, hint: Any, value: Any) -> Any:
    """A value as an option keeps it.

    >>> checked("batch_size", Count, 64)
    64

    Args:
        name: of the option, with underscores.
        hint: its annotation.
        value: from Python, or from :func:`read`. Numbers of numpy, and paths, become plain ones.

    Raises:
        UsageError: it is of another type, or out of range; the sentence names the flag and the value.
        UnknownNameError: it is none of the option's names.
    """
    kind, rule, optional = _declared(hint)
    if value is None and optional:
        return None
    flag = "--" + name.replace("_", "-")
    if isinstance(rule, Names):
        if not isinstance(value, str) or value not in rule.known:
            raise UnknownNameError(flag, str(value), rule.known)
        return value
    try:
        return _KEPT[kind](value, rule)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(f"{flag} must be {_says(kind, rule)}, not {shown(value)}.{_advice(rule, value)}") from None


def read(hint: Any, text: str) -> Any:
    """The plain value that text means to an option; the text itself where it means none, for :func:`checked` to refuse.

    >>> read(Count, "64"), read(Count, "1.5"), read(Count, "many")
    (64, 1.5, 'many')
    """
    kind = _declared(hint)[0]
    if kind is bool:
        return _BOOLEANS.get(text.lower(), text)
    for number in (int, float) if kind in (int, float) else ():
        try:
            return number(text)
        except ValueError:
            continue
    return text


def of_keywords(kind: Callable[..., T], given: Mapping[str, Any]) -> T:
    """A dataclass of options from keywords.

    Raises:
        UnknownNameError: it has no field of that name.
    """
    dataclass: Any = kind
    known = [field.name for field in fields(dataclass)]
    for name in given:
        if name not in known:
            raise UnknownNameError("option", name, known)
    return kind(**given)


class Checked:
    """Base of frozen dataclasses whose fields are options: each is checked, and kept in its plain form."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for field, hint in _declarations(kind):
            object.__setattr__(self, field, checked(field, hint, getattr(self, field)))


def data_sets_in(options: Any) -> dict[str, str]:
    """The data sets that options name, by option: values of fields that are declared as :class:`DataSetName`."""
    hints = typing.get_type_hints(type(options), include_extras=True)
    names = [name for name, hint in hints.items() if isinstance(_declared(hint)[1], DataSetName)]
    return {name: value for name in names if (value := getattr(options, name)) is not None}


@functools.cache
def _declarations(kind: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(field.name, hints[field.name]) for field in fields(kind) if _declared(hints[field.name])[0] in _KEPT]


@functools.cache
def _declared(hint: Any) -> tuple[Any, Any, bool]:
    """Plain type, rule, and whether None is a value."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind, rule, optional = _declared(arguments[0])
        return kind, next((each for each in arguments[1:] if isinstance(each, _RULES)), rule), optional
    if origin in (typing.Union, types.UnionType):
        kind, rule, _ = _declared(next(each for each in arguments if each is not type(None)))
        return kind, rule, True
    if origin is Literal:
        return str, Names(arguments), False
    return hint, None, False


def _boolean(value: Any, rule: None) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _whole(value: Any, rule: Range | None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or (rule and int(value) not in rule):
        raise TypeError
    return int(value)


def _real(value: Any, rule: Range | None) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    number = float(value)
    if not math.isfinite(number) or (rule and number not in rule):
        raise ValueError
    return number


def _text(value: Any, rule: Text | _Size | None) -> str:
    if isinstance(rule, _Size) and not isinstance(value, str):
        return _bytes(value)
    number = isinstance(rule, Text) and isinstance(value, (int, float)) and not isinstance(value, bool)
    text = str(value) if number else os.fspath(value)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise TypeError
    if isinstance(rule, _Size):
        parse_bytes(text)
    if isinstance(rule, Text) and rule.read(text) in (None, False):
        raise ValueError
    return text


def _bytes(value: Any) -> str:
    count = _real(value, None)
    if count < LEAST_BYTES or count != round(count):
        raise ValueError
    return f"{round(count)}B"


_TRUE, _FALSE = ("true", "yes", "on", "t", "y", "1"), ("false", "no", "off", "f", "n", "0")
_BOOLEANS = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)
_RULES = (Range, Names, Text, DataSetName, _Size)
_KEPT: dict[Any, Callable[[Any, Any], Any]] = {bool: _boolean, int: _whole, float: _real, str: _text}
_SAYS = {bool: "true or false", int: "a whole number", float: "a number", str: "text that is not empty"}


def _says(kind: Any, rule: Any) -> str:
    if isinstance(rule, _Size):
        return "a positive size with its unit, like 100MB (10^6 bytes) or 512MiB (2^20)"
    if isinstance(rule, Text):
        return rule.says
    return f"{_SAYS[kind]}{rule or ''}"


def _advice(rule: Any, value: Any) -> str:
    """What a size without a unit was meant to be."""
    number = shown(value).strip("' ")
    if isinstance(rule, _Size) and number.isdecimal() and number.strip("0"):
        return f" Did you mean {number}MB or {number}MiB?"
    return ""


def _number(end: float) -> str:
    return f"{end:,}"
