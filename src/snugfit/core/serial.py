"""Frozen dataclasses to JSON-able data and back."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_data(value: Any) -> Any:
    """Turn dataclasses, tuples, lists and dicts into plain JSON-able data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_data(item) for key, item in value.items()}
    return value


def from_data(kind: type[T], data: dict[str, Any]) -> T:
    """Rebuild a dataclass from :func:`to_data`'s output; keys it does not know are ignored."""
    hints = typing.get_type_hints(kind)
    fields = {f.name for f in dataclasses.fields(kind) if f.init}  # type: ignore[arg-type]
    return kind(**{name: _restore(hints[name], item) for name, item in data.items() if name in fields})


def _restore(hint: Any, item: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if item is None:
        return None
    if origin in (typing.Union, types.UnionType):
        return _restore(next(a for a in arguments if a is not type(None)), item)
    if dataclasses.is_dataclass(hint):
        return from_data(hint, item)  # type: ignore[arg-type]
    if origin is dict:
        return {key: _restore(arguments[1], i) for key, i in item.items()}
    if origin in (tuple, list):
        repeated = origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis)
        hints = [arguments[0]] * len(item) if repeated else arguments
        return origin(_restore(h, i) for h, i in zip(hints, item, strict=False))
    return item
