"""Help texts of options: the ``Attributes`` section of the docstrings of their dataclasses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any


def help_of(kind: type[Any]) -> dict[str, str]:
    """Help text of each option of a dataclass and of its bases, as one line."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        found.update(_attributes(each.__doc__ or ""))
    return found


def with_help(summary: str, texts: Mapping[str, str]) -> str:
    """A docstring with these help texts."""
    lines = (f"    {name}: {text}" for name, text in texts.items())
    return "\n".join([summary, "", "Attributes:", *lines])


def _attributes(docstring: str) -> dict[str, str]:
    _, _, section = inspect.cleandoc(docstring).partition("\nAttributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        start = re.fullmatch(r" {4}(\w+): (.*)", line)
        if start:
            name, found[start[1]] = start[1], start[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found
