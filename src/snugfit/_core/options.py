"""Declared options: values from Python, YAML and the command line are checked against type annotations.

An annotation declares an option: ``lr: Annotated[float | None, Range(above=0)] = None``. Errors do not depend on the
origin of a value: text is first converted to a plain value (:func:`read`), then checked like a value from Python
(:func:`checked`).
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar

from snugfit._core.amounts import MOST_PIXELS, parse_bytes, parse_seconds, parse_shape, parse_sides
from snugfit._core.inputs import parse_inputs
from snugfit.errors import UnknownNameError, UsageError, shown

T = TypeVar("T")
MIN_BYTES = 10**6
"""Smallest size as a number of bytes; smaller numbers probably mean MB."""


@dataclass(frozen=True)
class Range:
    """An interval of numbers.

    Attributes:
        least, most: included bounds.
        above, below: excluded bounds.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f" from {self.least:,} to {self.most:,}"
        ends = {"of at least": self.least, "above": self.above, "of at most": self.most, "below": self.below}
        parts = [f" {words} {end:,}" for words, end in ends.items() if math.isfinite(end)]
        return " and".join(parts).replace(" and of ", " and ")


@dataclass(frozen=True)
class Names:
    """Known names, if they are not listed in a ``Literal``."""

    known: tuple[str, ...]


@dataclass(frozen=True)
class Text:
    """Texts of a certain form.

    Attributes:
        form: description that completes "must be".
        read: parses a text; raises ValueError, or returns None or False, if the form is wrong.
        write: the text of another value from Python; raises ValueError or TypeError for one that has none.
    """

    form: str
    read: Callable[[str], object]
    write: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class Common:
    """Marks an option that the short help of commands shows.

    Attributes:
        value: what the flag takes, like SIZE; empty for a flag without a value.
        text: a line of help.
        commands: whose short help shows it; all that have the option by default.
    """

    value: str
    text: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSetName:
    """Names of data sets or image folders; they are checked early, made absolute, and opened for the strategy."""


Count = Annotated[int, Range(1, 10**9)]
Share = Annotated[float, Range(0, 1)]
Workers = Annotated[int, Range(1, 1024)]
"""Threads, processes or devices."""


def _bytes(value: Any) -> str:
    count = _real(value, None)
    if count < MIN_BYTES or count != round(count):
        raise ValueError
    return f"{round(count)}B"


_SIZE = Text("a positive size with its unit, like 100MB (10^6 bytes) or 512MiB (2^20)", parse_bytes, _bytes)
Size = Annotated[str, _SIZE]
"""Text with a unit, or from Python a whole number of bytes."""
AUTO, EXACT = "auto", "exact"
ANY_STRATEGY = (AUTO, EXACT)
"""Values of ``--strategy`` that name none: all that serve a request, or those of them with exact gradients."""
_SIZE_OR_AUTO = Text(f"{AUTO} or {_SIZE.form}", lambda text: text == AUTO or parse_bytes(text), _bytes)
SizeOrAuto = Annotated[str, _SIZE_OR_AUTO]
"""A size, or ``auto``: what the machine has."""
_DECODING_THREADS = Text(
    f"{AUTO} or a whole number from 0 to 1,024",
    lambda text: text == AUTO or (text.isdecimal() and int(text) <= 1024),
    lambda value: str(_integer(value, Range(0, 1024))),
)
DecodingThreads = Annotated[str, _DECODING_THREADS]
"""A number of threads, 0 for none, or ``auto``: as many as there are cores, within limits."""
BALANCED = "balanced"


def parse_weights(text: str) -> tuple[float, ...]:
    """Numbers above 0, one for each class, from text like ``1,2.5``; raises ValueError."""
    weights = tuple(map(float, text.split(",")))
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError
    return weights


def _joined(values: Any, separator: str, item: Callable[[Any], object], parse: Callable[[str], object]) -> str:
    """A sequence from Python as the text of the command line, which ``parse`` checks."""
    if isinstance(values, bytes):
        raise TypeError
    text = separator.join(str(item(value)) for value in values)
    parse(text)
    return text


def _weights(values: Any) -> str:
    return _joined(values, ",", lambda value: repr(_real(value, None)), parse_weights)


_WEIGHTS = Text(
    f"{BALANCED}, or a number above 0 for each class, like 1,2.5",
    lambda text: text == BALANCED or parse_weights(text),
    _weights,
)
ClassWeights = Annotated[str, _WEIGHTS]
"""``balanced``, or one number for each class: text, or from Python a sequence."""


def _shape(values: Any) -> str:
    return _joined(values, "x", lambda value: _integer(value, None), parse_shape)


def _input_shapes(values: Any) -> str:
    """Shapes from Python, in a sequence or by name, as texts with commas; or that of one image."""

    def written(value: Any) -> str:
        if isinstance(value, str):
            return value
        sizes = [str(_integer(size, None)) for size in value]
        return "x".join(sizes if len(values) == 1 else [*sizes, "float32"])

    if isinstance(values, Mapping):
        values = [f"{name}={written(value)}" for name, value in values.items()]
    elif all(isinstance(value, numbers.Integral) for value in values):
        return _shape(values)
    return _joined(values, ",", written, parse_inputs)


_INPUT_SHAPES = Text(
    "channels, height and width, like 3x224x224, or several inputs, like 3x224x224,16xint64",
    parse_inputs,
    _input_shapes,
)
InputShapes = Annotated[str, _INPUT_SHAPES]
"""Shape of one image, or shapes, types and names of several inputs: text, or from Python a sequence or a mapping."""


def _sides(value: Any) -> str:
    values = [value] if isinstance(value, numbers.Integral) else value
    return _joined(values, "x", lambda side: _integer(side, None), parse_sides)


_SIDES = Text(f"a side of up to {MOST_PIXELS:,} pixels, or height and width like 96x160", parse_sides, _sides)
ImageSize = Annotated[str, _SIDES]
"""Size of images: text, or from Python a number or a pair."""
Positive = Annotated[float, Range(above=0)]
Choice = Literal["auto", "on", "off"]
Seconds = Annotated[str, Text("a duration like 90s, 15m or 1h30m", parse_seconds)]
CacheDtype = Literal["float32", "float16", "bfloat16", "uint8"]
"""Stored type of cached activations."""
ImportanceMetric = Literal["contribution", "weight", "gradient"]
"""``contribution`` is ElasticTrainer's own; it compares with the others in its Figure 20."""
WeightUpdate = Literal["all-reduce", "gateway"]
"""Where the weights of tiled layers are updated."""
TileSizes = Literal["equal", "speed"]
Rest = Literal["gateway", "replicated"]
"""Where the layers behind the tiled ones are computed: by rank 0, or by every process."""


def checked(name: str, hint: Any, value: Any) -> Any:
    """Check a value from Python or :func:`read`, and convert it; NumPy numbers and paths become plain values.

    >>> checked("batch_size", Count, 64)
    64

    Raises:
        UsageError: the type or range is wrong; the message names flag and value.
        UnknownNameError: the name is unknown.
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
        return _CONVERTERS[kind](value, rule)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(
            f"{flag} must be {_expectation(kind, rule)}, not {shown(value)}.{_advice(rule, value)}"
        ) from None


def read(hint: Any, text: str) -> Any:
    """Convert text to a plain value of an option; return invalid text unchanged, for :func:`checked` to reject.

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


def from_keywords(kind: Callable[..., T], given: Mapping[str, Any]) -> T:
    """A dataclass of options from keywords; raises UnknownNameError for one that it lacks."""
    dataclass: Any = kind
    known = [field.name for field in fields(dataclass)]
    for name in given:
        if name not in known:
            raise UnknownNameError("option", name, known)
    return kind(**given)


class Checked:
    """Base of frozen dataclasses whose fields are options; each field is checked and converted.

    A strategy's dataclass inherits its options. A text that its ``propose`` fills in is empty before.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for field, hint in _declarations(kind):
            value = getattr(self, field.name)
            if not (isinstance(value, str) and value == "" == field.default):
                object.__setattr__(self, field.name, checked(field.name, hint, value))


def data_sets_in(options: Any) -> dict[str, str]:
    """Data sets by option: values of fields with the annotation :class:`DataSetName`."""
    hints = typing.get_type_hints(type(options), include_extras=True)
    names = [name for name, hint in hints.items() if isinstance(_declared(hint)[1], DataSetName)]
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def common_options(name: str, hint: Any) -> Iterator[tuple[str, Common]]:
    """Options marked as :class:`Common`, by name: this one, or those among the fields of a dataclass of options."""
    kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    yield from ((name, mark) for mark in marks if isinstance(mark, Common))
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        for each in fields(kind):
            yield from common_options(each.name, hints[each.name])


@functools.cache
def _declarations(kind: Any) -> list[tuple[Field[Any], Any]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(field, hints[field.name]) for field in fields(kind) if _declared(hints[field.name])[0] in _CONVERTERS]


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


def _integer(value: Any, rule: Range | None) -> int:
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


def _text(value: Any, rule: Text | None) -> str:
    if isinstance(rule, Text) and rule.write is not None and not isinstance(value, str):
        return rule.write(value)
    number = isinstance(rule, Text) and isinstance(value, (int, float)) and not isinstance(value, bool)
    text = str(value) if number else os.fspath(value)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise TypeError
    if isinstance(rule, Text) and rule.read(text) in (None, False):
        raise ValueError
    return text


_TRUE, _FALSE = ("true", "yes", "on", "t", "y", "1"), ("false", "no", "off", "f", "n", "0")
_BOOLEANS = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)
_RULES = (Range, Names, Text, DataSetName)
_CONVERTERS: dict[Any, Callable[[Any, Any], Any]] = {bool: _boolean, int: _integer, float: _real, str: _text}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text that is not empty"}


def _expectation(kind: Any, rule: Any) -> str:
    return rule.form if isinstance(rule, Text) else f"{_KINDS[kind]}{rule or ''}"


def _advice(rule: Any, value: Any) -> str:
    """Suggestion for a size without a unit."""
    number = shown(value).strip("' ")
    if rule in (_SIZE, _SIZE_OR_AUTO) and number.isdecimal() and number.strip("0"):
        return f" Did you mean {number}MB or {number}MiB?"
    return ""


def help_of(kind: type[Any]) -> dict[str, str]:
    """Help text of each option of a dataclass and of its bases, as one line."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        section = inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:\n")[2]
        attributes = re.split(r"\n(?=\S)", section)[0]
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE):
            found[name] = " ".join(text.split())
    return found


def with_help(summary: str, texts: Mapping[str, str]) -> str:
    """A docstring with these help texts."""
    lines = (f"    {name}: {text}" for name, text in texts.items())
    return "\n".join([summary, "", "Attributes:", *lines])
