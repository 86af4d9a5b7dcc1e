"""Merge the options of several strategies into one set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from snugfit._core.option_groups import BaseRequest

Declared = tuple[Any, Any]
"""Type and default of an option."""


def declared_options(kind: type[Any]) -> dict[str, Declared]:
    """The options that a dataclass declares, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {option.name: (hints[option.name], option.default) for option in fields(kind)}


def merged_options(kinds: Iterable[type[Any]]) -> dict[str, Declared]:
    """The options of several dataclasses, by name; choices of options of the same name are merged.

    Raises:
        TypeError: two of them declare an option of one name differently, or one has the name of a common option.
    """
    common = {option.name for group in fields(BaseRequest) for option in _fields_of(group)}
    found: dict[str, Declared] = {}
    for kind in kinds:
        for name, declared in declared_options(kind).items():
            if name in common:
                raise TypeError(f"the option {name} is one that every run has")
            found[name] = _merged(name, declared, found.get(name))
    return found


def _fields_of(group: Field[Any]) -> tuple[Field[Any], ...]:
    assert callable(group.default_factory)
    return fields(group.default_factory())


def _merged(name: str, declared: Declared, before: Declared | None) -> Declared:
    if before is None or before == declared:
        return declared
    names = [*dict.fromkeys([*_choices(before[0]), *_choices(declared[0])])]
    if not names or before[1] is not None or declared[1] is not None:
        raise TypeError(f"the option {name} is declared differently by two strategies")
    return Literal[tuple(names)] | None, None


def _choices(hint: Any) -> Iterator[str]:
    """Names of an optional choice, such as ``Literal["a", "b"] | None``."""
    for part in get_args(hint):
        if get_origin(part) is Literal:
            yield from get_args(part)
