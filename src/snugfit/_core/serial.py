"""Frozen dataclasses to JSON-able data and back."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")

_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    dict: "an object",
    list: "a list",
}
_VALUE_NAMES = {**_TYPE_NAMES, bool: "a boolean", tuple: "a list", type(None): "null"}


class FieldError(ValueError):
    """Data that does not match the type of a field; the message names the field and the expected type."""

    def __init__(self, where: str, expected: str, given: Any) -> None:
        found = _VALUE_NAMES.get(type(given), type(given).__name__)
        shown = f" ({given!r:.40})" if isinstance(given, (str, int, float)) else ""
        super().__init__(f"'{where}' must be {expected}, not {found}{shown}")


def to_data(value: Any) -> Any:
    """Turn dataclasses, tuples, lists and dicts into plain JSON-able data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_data(item) for key, item in value.items()}
    return value


def from_data(kind: type[T], data: Any, where: str = "") -> T:
    """Rebuild a dataclass from the result of :func:`to_data`; unknown keys are ignored.

    ``where`` is the field that contains it, for a :class:`FieldError`.
    """
    if not isinstance(data, dict):
        raise FieldError(where or "the whole", "an object", data)
    values = {}
    for name, (hint, required) in _fields(typing.cast(Any, kind)).items():
        place = f"{where}.{name}" if where else name
        if name in data:
            values[name] = _restore(hint, data[name], place)
        elif required:
            raise FieldError(place, f"there, as {_expected(hint)}", None)
    return kind(**values)


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Type of each field of the constructor, and whether it is required."""
    hints = typing.get_type_hints(kind)
    none = dataclasses.MISSING
    given = [each for each in dataclasses.fields(kind) if each.init]
    return {each.name: (hints[each.name], each.default is none and each.default_factory is none) for each in given}


def _restore(hint: Any, item: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (item is None and type(None) in arguments):
        return item
    if origin in (typing.Union, types.UnionType):
        return _restore(next((each for each in arguments if each is type(item)), _without_none(hint)), item, where)
    if dataclasses.is_dataclass(hint):
        return from_data(typing.cast(Any, hint), item, where)
    if origin is dict:
        values = _typed(dict, item, where).items()
        return {key: _restore(arguments[1], each, f"{where}.{key}") for key, each in values}
    if origin not in (tuple, list):
        return _typed(hint, item, where)
    if not isinstance(item, (list, tuple)):
        raise FieldError(where, "a list", item)
    repeated = origin is list or arguments[1:] == (...,)
    hints = [arguments[0]] * len(item) if repeated else arguments
    if len(hints) != len(item):
        raise FieldError(where, f"a list of {len(hints)}", item)
    return origin(_restore(hint, each, f"{where}[{n}]") for n, (hint, each) in enumerate(zip(hints, item, strict=True)))


def _without_none(hint: Any) -> Any:
    return next(each for each in typing.get_args(hint) if each is not type(None))


def _typed(hint: Any, item: Any, where: str) -> Any:
    """The value, if it has the plain type; integers are also numbers, but booleans are not integers."""
    if typing.get_origin(hint) is typing.Literal:
        fits = any(item == each and type(item) is type(each) for each in typing.get_args(hint))
    else:
        fits = isinstance(item, (int, float) if hint is float else hint)
        fits = fits and (hint is bool or not isinstance(item, bool))
    if not fits:
        raise FieldError(where, _expected(hint), item)
    return item


def _expected(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if origin in (typing.Union, types.UnionType):
        return _expected(_without_none(hint))
    return _TYPE_NAMES.get(list if origin in (tuple, list) else hint, "an object")
